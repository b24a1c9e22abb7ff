{{- /* Variables of a policy on pods, after `templates`: a list of pod templates, each of which may lack anything. `containers` and
`contexts` are lists of one list for each template. A null in a template of a job takes away what the operator has set, so it is
looked at, too. */ -}}
{{- define "pseudoreal.podVariables" -}}
- name: pods
  expression: "variables.templates.filter(t, has(t.spec)).map(t, t.spec)"
- name: containers
  expression: >-
    variables.pods.map(p, (has(p.containers) ? p.containers : dyn([])) + (has(p.initContainers) ? p.initContainers :
    dyn([])) + (has(p.ephemeralContainers) ? p.ephemeralContainers : dyn([])))
# The security contexts of pods, and of containers.
- name: contexts
  expression: >-
    variables.pods.map(p, has(p.securityContext) && p.securityContext != null ? [p.securityContext] : []) + variables.containers.map(l,
    l.filter(c, has(c.securityContext) && c.securityContext != null).map(c, c.securityContext))
{{- end }}

{{- /* Validations over those variables and `volumes`. `rendered`: the templates are whole, as Jobs have them, so what must be there
is asked for as well. */ -}}
{{- define "pseudoreal.podRules" -}}
{{- if not .allow.serviceAccounts }}
{{- /* Where nothing is said, a pod gets a token; that of reports opens nothing else. */}}
- expression: >-
    variables.pods.all(p, !has(p.serviceAccountName) && !has(p.serviceAccount) &&
    {{ if .rendered }}p.?automountServiceAccountToken.orValue(true){{ else }}p.?automountServiceAccountToken.orValue(false){{ end }} == false) &&
    variables.volumes.all(l, l.all(v, !has(v.projected) || !has(v.projected.sources) || v.projected.sources.all(s, !has(s.podCertificate) &&
    {{ if .rendered }}(!has(s.serviceAccountToken) || s.serviceAccountToken.?audience == optional.of('operator.pseudoreal.dev')){{ else }}!has(s.serviceAccountToken){{ end }})))
  message: a template of a job must not choose a service account or mount its token (admissionPolicy.allow.serviceAccounts)
{{- end }}
{{- if not .allow.hostPath }}
- expression: variables.volumes.all(l, l.all(v, !has(v.hostPath) && !has(v.flexVolume)))
  message: no volume of a job may be a hostPath or a flexVolume (admissionPolicy.allow.hostPath)
{{- end }}
{{- if not .allow.privileged }}
- expression: >-
    variables.contexts.all(l, l.all(c, c.?privileged.orValue(false) != true && c.?allowPrivilegeEscalation.orValue(false) == false &&
    (!has(c.procMount) || c.procMount == null || c.procMount == 'Default'))) &&
    variables.pods.all(p, p.?hostPID.orValue(false) != true && p.?hostIPC.orValue(false) != true)
  message: no container of a job may be privileged, gain privileges, see all of /proc or share processes with its node (admissionPolicy.allow.privileged)
{{- /* Those that baseline allows, and IPC_LOCK for RDMA. */}}
- expression: >-
    variables.contexts.all(l, l.all(c, !has(c.capabilities) || c.capabilities == null || !has(c.capabilities.add) || c.capabilities.add ==
    null || c.capabilities.add.all(a, a in ['IPC_LOCK', 'AUDIT_WRITE', 'CHOWN', 'DAC_OVERRIDE', 'FOWNER', 'FSETID', 'KILL', 'MKNOD',
    'NET_BIND_SERVICE', 'SETFCAP', 'SETGID', 'SETPCAP', 'SETUID', 'SYS_CHROOT'])))
  message: no container of a job may add capabilities but IPC_LOCK and those that a runtime gives by itself (admissionPolicy.allow.privileged)
- expression: >-
    variables.contexts.all(l, l.all(c, (!has(c.seccompProfile) || c.seccompProfile == null || c.seccompProfile.type != 'Unconfined') &&
    (!has(c.appArmorProfile) || c.appArmorProfile == null || c.appArmorProfile.type != 'Unconfined') &&
    (!has(c.windowsOptions) || c.windowsOptions == null || c.windowsOptions.?hostProcess.orValue(false) != true) &&
    (!has(c.seLinuxOptions) || c.seLinuxOptions == null || (c.seLinuxOptions.?user.orValue('') == '' && c.seLinuxOptions.?role.orValue('') ==
    '' && c.seLinuxOptions.?type.orValue('') in ['', 'container_t', 'container_init_t', 'container_kvm_t', 'container_engine_t'])) &&
    (!has(c.sysctls) || c.sysctls == null || c.sysctls.all(s, s.name in ['kernel.shm_rmid_forced', 'net.ipv4.ip_local_port_range',
    'net.ipv4.ip_local_reserved_ports', 'net.ipv4.ip_unprivileged_port_start', 'net.ipv4.ping_group_range', 'net.ipv4.tcp_fin_timeout',
    'net.ipv4.tcp_keepalive_intvl', 'net.ipv4.tcp_keepalive_probes', 'net.ipv4.tcp_keepalive_time', 'net.ipv4.tcp_rmem',
    'net.ipv4.tcp_syncookies', 'net.ipv4.tcp_wmem'])))) && variables.templates.all(t, !has(t.metadata) || !has(t.metadata.annotations) ||
    t.metadata.annotations == null || t.metadata.annotations.all(k, !k.startsWith('container.apparmor.security.beta.kubernetes.io/') ||
    t.metadata.annotations[k] != 'unconfined'))
  message: no container of a job may leave seccomp, AppArmor or SELinux, or set other sysctls than the safe ones (admissionPolicy.allow.privileged)
{{- end }}
{{- if not .allow.rootUser }}
- expression: >-
    variables.pods.all(p, {{ if .rendered }}has(p.securityContext) && p.securityContext.?runAsNonRoot.orValue(false) == true{{ else -}}
    !has(p.securityContext) || (p.securityContext != null && p.securityContext.?runAsNonRoot.orValue(true) == true){{ end }}) &&
    variables.contexts.all(l, l.all(c, c.?runAsNonRoot.orValue(true) != false && c.?runAsUser.orValue(1) != 0))
    {{- if and .rendered (not .allow.privileged) }} &&
    variables.containers.all(l, l.all(c, c.name != 'trainer' || c.?securityContext.?allowPrivilegeEscalation.orValue(true) == false))
    {{- else if not .rendered }} && variables.containers.all(l, l.all(c, !has(c.securityContext) || c.securityContext != null)){{ end }}
  message: no container of a job may run as root, and what keeps it from that stays (admissionPolicy.allow.rootUser)
{{- end }}
{{- if not .allow.hostNetwork }}
- expression: >-
    variables.pods.all(p, p.?hostNetwork.orValue(false) != true) && variables.containers.all(l, l.all(c, (!has(c.ports) || c.ports
    == null || c.ports.all(o, !has(o.hostPort) || o.hostPort == null || o.hostPort == 0)) && [c.?livenessProbe, c.?readinessProbe, c.?startupProbe,
    c.?lifecycle.?postStart, c.?lifecycle.?preStop].all(o, o.?httpGet.?host.orValue('') == '' && o.?tcpSocket.?host.orValue('') == '')))
  message: no job may use the network of its node (admissionPolicy.allow.hostNetwork)
{{- end }}
- expression: "variables.pods.all(p, !has(p.nodeName))"
  message: no template of a job may name a node, which passes by the scheduler, quotas and taints; use a nodeSelector of kubernetes.io/hostname
{{- end }}
