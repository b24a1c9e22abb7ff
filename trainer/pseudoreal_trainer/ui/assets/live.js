"use strict";
// Keeps a page up to date: takes the parts that have changed from the server's stream, and leaves everything else as the
// user has it: zoomed figures, open tables, places of scroll bars, the focus, and selected text.
(() => {
  const { events } = document.body.dataset;
  let { digest } = document.body.dataset;
  const connection = document.getElementById("connection");
  const ordered = document.querySelector("[data-ordered]");
  const prefix = ordered.dataset.ordered;

  const say = (sentence) => {
    connection.hidden = sentence === "";
    if (connection.textContent !== sentence) connection.textContent = sentence;
  };

  const parsed = (html) => {
    const template = document.createElement("template");
    template.innerHTML = html;
    return template.content;
  };

  // What a user has changed of an element, by names that a new version of the element has, too.
  const nameOf = (element) => element.getAttribute("aria-label") || element.getAttribute("href") || element.textContent;
  const stateOf = (element) => {
    const active = document.activeElement;
    return {
      open: new Set([...element.querySelectorAll("details[open] > summary")].map(nameOf)),
      scrolled: new Map([...element.querySelectorAll(".scroll")].map((each) => [nameOf(each), [each.scrollLeft, each.scrollTop]])),
      focus: element.contains(active) && active !== element ? [active.tagName, nameOf(active)] : null,
    };
  };
  const restore = (element, { open, scrolled, focus }) => {
    for (const summary of element.querySelectorAll("details > summary")) if (open.has(nameOf(summary))) summary.parentElement.open = true;
    for (const each of element.querySelectorAll(".scroll")) {
      const [left, top] = scrolled.get(nameOf(each)) ?? [0, 0];
      if (left || top) each.scrollTo({ left, top, behavior: "instant" });
    }
    if (!focus) return;
    const again = [...element.querySelectorAll(focus[0])].find((each) => nameOf(each) === focus[1]);
    if (again) again.focus({ preventScroll: true });
  };

  const isSelected = (element) => {
    const selection = getSelection();
    return selection !== null && !selection.isCollapsed && selection.containsNode(element, true);
  };

  // Parts that wait until their text is no longer selected.
  const waiting = new Map();

  const replacePart = (name, html) => {
    const element = document.querySelector(`[data-part="${name}"]`);
    if (!element) return;
    if (isSelected(element)) { waiting.set(name, html); return; }
    waiting.delete(name);
    const state = stateOf(element);
    element.replaceChildren(parsed(html));
    restore(element, state);
    offerCopies(element);
  };

  // All of a figure but its plot, which `page.js` draws into, and the plot's readout.
  const replaceFigure = (before, after) => {
    const state = stateOf(before);
    const [plot, next] = [before.querySelector(".plot"), after.querySelector(".plot")];
    for (const { name, value } of next.attributes) plot.setAttribute(name, value);
    const readout = before.querySelector(".readout");
    for (const each of [...before.childNodes]) if (each !== plot && each !== readout) each.remove();
    let isBefore = true;
    for (const each of [...after.childNodes]) {
      if (each === next) isBefore = false;
      else if (isBefore) before.insertBefore(each, plot);
      else before.append(each);
    }
    restore(before, state);
  };

  const idOf = (element) => element.dataset.name ?? `${prefix}${element.id}`;
  const replaceOrdered = (parts, order) => {
    const known = new Map([...ordered.children].map((each) => [idOf(each), each]));
    for (const [name, html] of Object.entries(parts)) {
      if (!name.startsWith(prefix)) continue;
      const [before, after] = [known.get(name), parsed(html).firstElementChild];
      if (before && prefix === "figure/") replaceFigure(before, after);
      else {
        if (before) { const state = stateOf(before); before.replaceWith(after); restore(after, state); }
        known.set(name, after);
      }
    }
    if (!order) return;
    const wanted = new Set(order);
    for (const [name, element] of known) if (!wanted.has(name)) element.remove();
    // An element that is in its place is not moved: to move it would take the focus away.
    let at = ordered.firstElementChild;
    for (const name of order) {
      const element = known.get(name);
      if (element === at) at = at.nextElementSibling;
      else ordered.insertBefore(element, at);
    }
  };

  const apply = (change) => {
    const begin = performance.now();
    digest = change.digest;
    document.title = `${change.title} – pseudoreal`;
    const title = document.getElementById("title");
    if (title && title.textContent !== change.title) title.textContent = change.title;
    replaceOrdered(change.parts, change.order);
    for (const [name, html] of Object.entries(change.parts)) if (!name.startsWith(prefix)) replacePart(name, html);
    if (change.charts) window.pseudoreal.update(change.charts);
    filter();
    document.documentElement.dataset.updated = digest;
    document.documentElement.dataset.updateSeconds = String((performance.now() - begin) / 1000);
  };

  // A command is copied by a button; the browser allows that on this machine's own address.
  const offerCopies = (element) => {
    if (!navigator.clipboard) return;
    for (const button of element.querySelectorAll(".copy")) {
      button.hidden = false;
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
    }
  };

  const filters = document.getElementById("filters");
  const chosen = () => Object.fromEntries([...new FormData(filters)].filter(([, value]) => value !== ""));
  const offerChoices = () => {
    for (const select of filters.querySelectorAll("select")) {
      const values = new Set([...ordered.children].map((row) => row.dataset[select.name]).filter(Boolean));
      if (select.value) values.add(select.value);
      const wanted = ["", ...[...values].sort()];
      const there = [...select.options].map((option) => option.value);
      if (wanted.length === there.length && wanted.every((value, index) => value === there[index])) continue;
      const before = select.value;
      select.replaceChildren(...wanted.map((value) => new Option(value || "all", value)));
      select.value = before;
    }
  };
  const filter = () => {
    if (!filters) return;
    offerChoices();
    const { text = "", ...exact } = chosen();
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of ordered.children) {
      const content = words.length ? row.textContent.toLowerCase() : "";
      const fits = Object.entries(exact).every(([name, value]) => row.dataset[name] === value) && words.every((word) => content.includes(word));
      if (row.hidden === fits) row.hidden = !fits;
      shown += fits;
    }
    const all = ordered.children.length;
    document.getElementById("count").textContent = shown === all ? `${all} ${all === 1 ? "job" : "jobs"}` : `${shown} of ${all} jobs`;
  };
  if (filters) {
    filters.hidden = false;
    const given = new URLSearchParams(location.search);
    for (const field of filters.elements) {
      if (!given.has(field.name)) continue;
      if (field.tagName === "SELECT") field.append(new Option(given.get(field.name), given.get(field.name)));
      field.value = given.get(field.name);
    }
    filters.addEventListener("input", () => {
      const query = new URLSearchParams(chosen()).toString();
      history.replaceState(null, "", query ? `?${query}` : location.pathname);
      filter();
    });
    filters.addEventListener("submit", (event) => event.preventDefault());
    filter();
  }
  offerCopies(document);
  document.addEventListener("selectionchange", () => { for (const [name, html] of [...waiting]) replacePart(name, html); });

  // A browser holds six connections to a server: a page that nobody sees gives its own back.
  let stream = null;
  let again = 0;
  const close = () => { clearTimeout(again); if (stream) stream.close(); stream = null; };
  const open = () => {
    close();
    stream = new EventSource(`${events}?have=${encodeURIComponent(digest)}`);
    stream.addEventListener("open", () => say(""));
    stream.addEventListener("change", (event) => { say(""); apply(JSON.parse(event.data)); });
    stream.addEventListener("silent", (event) => say(event.data));
    stream.addEventListener("alive", () => say(""));
    stream.addEventListener("error", () => {
      say("The connection to pseudoreal ui is lost; the page shows the state before. It tries again; if the program has ended, start it again and open its new address.");
      // The browser tries by itself to connect again, but with the digest of an older state, and not after a refusal.
      close();
      again = setTimeout(open, 2000);
    });
  };
  const follow = () => { if (document.hidden) close(); else if (!stream) open(); };
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", close);
  addEventListener("pageshow", follow);
  say("");
  follow();
})();
