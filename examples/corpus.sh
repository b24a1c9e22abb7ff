#!/usr/bin/env bash
# Writes the quickstart's text, the King James Bible, to DIRECTORY/kjv/kjv.txt (4.1 MB, public domain), a verse a line.
# Source: Debian's packages bible-kjv-text (the text, compressed) and bible-kjv (the program that reads it).
# They are unpacked into a temporary folder, not installed, so no root is needed.
set -euo pipefail
target=${1:?usage: corpus.sh DIRECTORY}
[ -s "$target/kjv/kjv.txt" ] && exit 0
command -v apt-get >/dev/null || {
  echo "corpus.sh: apt-get is missing; put any text of 1 MB or more at $target/kjv/kjv.txt" >&2; exit 1; }

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
# apt drops its rights while it downloads, and must still be able to write here.
chmod 755 "$work"; cd "$work"
download() { apt-get -o APT::Sandbox::User=root download -qq "$@" 2>apt.log; }
download bible-kjv bible-kjv-text || {
  cat apt.log >&2; echo "corpus.sh: apt-get found no bible-kjv; run 'apt-get update' as root first" >&2; exit 1; }
# The library that the program was linked against; its package is called otherwise from Debian 13 on.
download libreadline8 || download libreadline8t64
for package in *.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH; LD_LIBRARY_PATH=$(find "$work/root" -name 'libreadline.so.8' -printf '%h:')
root/usr/bin/bible -p "$work/root/usr/lib" -l10000 Genesis1:1-Revelation22:21 | sed -nE 's/^ +[0-9]+ //p' >kjv.txt
[ "$(wc -c <kjv.txt)" -gt 4000000 ] || { echo "corpus.sh: the text came out too short" >&2; exit 1; }
cd "$OLDPWD"; mkdir -p "$target/kjv"; mv "$work/kjv.txt" "$target/kjv/kjv.txt"
chmod -R a+rX "$target"
echo "$target/kjv/kjv.txt: $(wc -c <"$target/kjv/kjv.txt") bytes"
