-- Argo CD's health of a PseudoRealJob. It goes into the ConfigMap argocd-cm, under the key
-- resource.customizations.health.pseudoreal.dev_PseudoRealJob (docs/gitops.md).
local status = obj.status or {}
local found = {}
for _, condition in ipairs(status.conditions or {}) do
  found[condition.type] = condition
end

local function holds(kind, value)
  return found[kind] ~= nil and found[kind].status == value
end

local function says(health, kind)
  return {status = health, message = found[kind].message}
end

if holds("Complete", "True") then
  return says("Healthy", "Complete")
elseif holds("Failed", "True") then
  return says("Degraded", "Failed")
elseif holds("Accepted", "False") then
  return says("Degraded", "Accepted")
end
-- What somebody must mend, as nothing else will.
local stuck = {Blocked = true, NameConflict = true, Unreadable = true, InternalError = true, InvalidSpec = true}
if holds("Progressing", "False") and stuck[found.Progressing.reason] then
  return says("Degraded", "Progressing")
elseif (status.observedGeneration or 0) < (obj.metadata.generation or 0) then
  return {status = "Progressing", message = "The operator has not seen this version of the job yet."}
elseif holds("Suspended", "True") then
  return says("Suspended", "Suspended")
elseif found.Progressing ~= nil then
  return says("Progressing", "Progressing")
end
return {status = "Progressing", message = "The operator has not seen this job yet."}
