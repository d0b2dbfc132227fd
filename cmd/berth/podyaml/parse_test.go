package podyaml

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// manifest returns a manifest with the given spec, whose lines are not indented.
func manifest(spec string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels: {app: web}\n  annotations: {note: hi}\nspec:\n  " +
		strings.ReplaceAll(strings.TrimSpace(spec), "\n", "\n  ") + "\n"
}

// one returns a container with the given additional fields, in flow style.
func one(fields string) string {
	if fields != "" {
		fields = ", " + fields
	}
	return "containers: [{name: app, image: busybox" + fields + "}]"
}

// problems parses a manifest and returns the reasons for its refusal.
func problems(t *testing.T, text string, mode Mode) []string {
	t.Helper()
	_, err := Parse([]byte(text), mode)
	if err == nil {
		return nil
	}
	var refused *Refused
	if !errors.As(err, &refused) {
		t.Fatalf("%v is not a refusal", err)
	}
	var out []string
	for _, p := range refused.Problems {
		out = append(out, p.String())
	}
	return out
}

// parsePod parses a manifest of one pod.
func parsePod(t *testing.T, text string) *corev1.Pod {
	t.Helper()
	m, err := Parse([]byte(text), Mode{})
	if err != nil {
		t.Fatal(err)
	}
	return m.Workloads[0].Pod
}

var refusals = []struct {
	name string
	spec string
	want []string // prefix of each problem
}{
	{"nothing", one(""), nil},
	{"explicit zero values", "hostNetwork: false\nnodeName: ''\nimagePullSecrets: []\nnodeSelector: {}\n" + one(""), nil},
	{"fields that hold anyway", "enableServiceLinks: true\nautomountServiceAccountToken: false\nos: {name: linux}\nhostUsers: true\n" + one(""), nil},
	{"all at once", `
runtimeClassName: gvisor
resourceClaims: [{name: gpu}]
volumes:
- {name: a, secret: {secretName: s}}
- {name: b, csi: {driver: d}}
- {name: c, emptyDir: {}}
containers:
- name: app
  image: busybox
  envFrom: [{configMapRef: {name: m}}]
  env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}]
  livenessProbe: {}
  volumeDevices: [{name: c, devicePath: /d}]
  lifecycle: {postStart: {tcpSocket: {port: 80}}}`, []string{
		"spec.volumes[1].csi: this command has no CSI drivers",
		"spec.containers[0].volumeDevices: not supported",
		"spec.containers[0].lifecycle.postStart.tcpSocket: only exec, httpGet and sleep",
		"spec.runtimeClassName: name the handler with --runtime-handler",
		"spec.resourceClaims: not supported",
		`spec.volumes[0].secret: the manifest has no Secret "s"`,
		`spec.containers[0].envFrom[0]: the manifest has no ConfigMap "m"`,
		`spec.containers[0].env[0].valueFrom.secretKeyRef: the manifest has no Secret "s"`,
		"spec.containers[0].livenessProbe: needs one of exec",
	}},
	{"windows in init containers", "initContainers: [{name: i, image: b, securityContext: {windowsOptions: {}}}]\n" + one(""), []string{
		"spec.initContainers[0].securityContext.windowsOptions: not supported"}},
	{"probes", "initContainers: [{name: i, image: b, readinessProbe: {exec: {command: [x]}}}]\n" +
		one(`startupProbe: {exec: {}}, livenessProbe: {httpGet: {port: web}, successThreshold: 2}, readinessProbe: {tcpSocket: {port: 1}, exec: {command: [x]}}`), []string{
		"spec.initContainers[0].readinessProbe: only a container that keeps running", "spec.containers[0].startupProbe.exec.command: is needed",
		`spec.containers[0].livenessProbe.httpGet.port: container app has no port "web"`, "spec.containers[0].livenessProbe.successThreshold: must be 1",
		"spec.containers[0].readinessProbe: needs one of"}},
	{"files", `
volumes:
- {name: a, configMap: {name: m, optional: true, items: [{key: k, path: ../x}], defaultMode: 4095}}
- {name: b, downwardAPI: {items: [{path: x, fieldRef: {fieldPath: status.podIP}}, {path: z, resourceFieldRef: {resource: limits.cpu}}]}}
- {name: c, projected: {sources: [{serviceAccountToken: {path: token}}, {}]}}
- {name: d, persistentVolumeClaim: {claimName: ../x}}
- {name: e, image: {reference: 'Bad Image'}}
` + one(""), []string{
		"spec.volumes[2].projected.sources[0].serviceAccountToken: this command has no API server",
		"spec.volumes[0].configMap.defaultMode:", "spec.volumes[0].configMap.items[0].path:", "spec.volumes[1].downwardAPI.items[0].fieldRef:",
		"spec.volumes[1].downwardAPI.items[1].resourceFieldRef.containerName:", "spec.volumes[2].projected.sources[1]: needs one source",
		"spec.volumes[3].persistentVolumeClaim.claimName:", "spec.volumes[4].image.reference:"}},
	{"ephemeral containers", "ephemeralContainers: [{name: d, image: b}]\n" + one(""), []string{"spec.ephemeralContainers: not supported"}},
	{"restart policy of an ordinary container", one("restartPolicy: Always"), []string{"spec.containers[0].restartPolicy: not supported"}},
	{"user namespace", "hostUsers: false\nhostNetwork: true\n" + one(""), nil},
	{"user namespace beside the host's", "hostUsers: false\nhostPID: true\nhostIPC: true\n" + one(""), []string{
		"spec.hostUsers: false: not possible with hostPID", "spec.hostUsers: false: not possible with hostIPC"}},
	{"dns", "dnsPolicy: Cluster\n" + one(""), []string{`spec.dnsPolicy: "Cluster" is not possible here, want Default or None`}},
	{"dns none", "dnsPolicy: None\n" + one(""), []string{"spec.dnsConfig.nameservers: at least one"}},
	{"dns words", "dnsConfig: {nameservers: [x], searches: ['a b'], options: [{name: \"a\\nb\"}]}\n" + one(""), []string{
		"spec.dnsConfig.nameservers[0]:", "spec.dnsConfig.searches[0]:", "spec.dnsConfig.options[0]:"}},
	{"no containers", "restartPolicy: Never", []string{"spec.containers: at least one"}},
	{"names", "volumes: [{name: ../x, emptyDir: {}}]\ncontainers: [{name: a/b, image: busybox}]", []string{
		"spec.volumes[0].name:", "spec.containers[0].name:"}},
	{"twice", "volumes: [{name: v, emptyDir: {}}, {name: v, emptyDir: {}}]\ncontainers: [{name: a, image: b}, {name: a, image: b}]", []string{
		`spec.volumes[1].name: "v" is there twice`, `spec.containers[1].name: "a" is there twice`}},
	{"images", "containers: [{name: a, image: 'Bad Image'}, {name: b}]", []string{"spec.containers[0].image:", "spec.containers[1].image:"}},
	{"volumes", `
volumes:
- {name: a}
- {name: b, emptyDir: {sizeLimit: 1Gi}}
- {name: c, emptyDir: {medium: HugePages}}
- {name: d, hostPath: {path: rel}}
- {name: e, hostPath: {path: /a/../b, type: Pipe}}
- {name: f, emptyDir: {mode: 4095}}
- {name: g, emptyDir: {}, hostPath: {path: /x}}
` + one(""), []string{
		"spec.volumes[0]: has no source",
		"spec.volumes[2].emptyDir.medium:", "spec.volumes[3].hostPath.path:", "spec.volumes[4].hostPath.path:",
		"spec.volumes[4].hostPath.type:", "spec.volumes[5].emptyDir.mode:", "spec.volumes[6]: has two sources"}},
	{"mounts", "volumes: [{name: v, emptyDir: {}}]\n" + one(`volumeMounts: [
  {name: none, mountPath: /a}, {name: v, mountPath: rel}, {name: v, mountPath: /d}, {name: v, mountPath: /d/},
  {name: v, mountPath: /e, subPath: ../x}, {name: v, mountPath: /f, subPath: x, subPathExpr: z},
  {name: v, mountPath: /g, mountPropagation: Bidirectional}, {name: v, mountPath: /h, recursiveReadOnly: Enabled},
  {name: v, mountPath: /i, bindMountOptions: [noexec, suid]}]`), []string{
		`spec.containers[0].volumeMounts[0].name: there is no volume "none"`, "spec.containers[0].volumeMounts[1].mountPath:",
		"spec.containers[0].volumeMounts[3].mountPath:", "spec.containers[0].volumeMounts[4].subPath:",
		"spec.containers[0].volumeMounts[5].subPathExpr:", "spec.containers[0].volumeMounts[6].mountPropagation:",
		"spec.containers[0].volumeMounts[7].recursiveReadOnly: needs readOnly", "spec.containers[0].volumeMounts[8].bindMountOptions[1]:"}},
	{"env", one(`env: [{name: 'a=b', value: x}, {name: B, valueFrom: {fieldRef: {fieldPath: spec.secrets}}},
  {name: C, valueFrom: {resourceFieldRef: {resource: limits.disk}}}, {name: D, valueFrom: {resourceFieldRef: {resource: limits.cpu, containerName: other}}},
  {name: E, value: x, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]`), []string{
		"spec.containers[0].env[0].name:", "spec.containers[0].env[1].valueFrom.fieldRef:", "spec.containers[0].env[2].valueFrom.resourceFieldRef:",
		`spec.containers[0].env[3].valueFrom.resourceFieldRef: there is no container "other"`, "spec.containers[0].env[4]: has more than one source"}},
	{"resources", one("resources: {limits: {cpu: '1', gpu: '1'}, requests: {cpu: '2', memory: '-1'}}"), []string{
		"spec.containers[0].resources.limits.gpu:", "spec.containers[0].resources.requests.gpu:", "spec.containers[0].resources.requests.memory:",
		"spec.containers[0].resources.requests.cpu: 2 is more than the limit 1"}},
	{"claims", one("resources: {claims: [{name: gpu}]}"), []string{"spec.containers[0].resources.claims: not supported"}},
	{"ports", "containers: [{name: a, image: b, ports: [{containerPort: 0}, {containerPort: 80, hostPort: 8080}]}, {name: c, image: b, ports: [{containerPort: 81, hostPort: 8080}, {containerPort: 1, hostIP: x, protocol: ICMP}]}]", []string{
		"spec.containers[0].ports[0].containerPort:", "spec.containers[1].ports[0].hostPort: 8080 is there twice",
		`spec.containers[1].ports[1].protocol: "ICMP"`, "spec.containers[1].ports[1].hostIP:"}},
	{"host network ports", "hostNetwork: true\nhostname: x\n" + one("ports: [{containerPort: 80}, {containerPort: 81, hostPort: 82}]"), []string{
		"spec.hostname:", "spec.containers[0].ports[1].hostPort: must be the containerPort"}},
	{"security", "hostPID: true\nshareProcessNamespace: true\nsecurityContext: {runAsUser: -1, fsGroup: 4294967296, sysctls: [{name: 'a b', value: x}], seccompProfile: {type: Localhost}}\n" +
		one("securityContext: {runAsUser: 4294967296, privileged: true, allowPrivilegeEscalation: false, seccompProfile: {type: Localhost, localhostProfile: ../x}, appArmorProfile: {type: Custom}}"), []string{
		"spec.shareProcessNamespace:", "spec.securityContext.runAsUser: -1", "spec.securityContext.fsGroup:", "spec.securityContext.sysctls[0].name:",
		"spec.securityContext.seccompProfile.localhostProfile:", "spec.containers[0].securityContext.runAsUser:",
		"spec.containers[0].securityContext.allowPrivilegeEscalation:", "spec.containers[0].securityContext.seccompProfile.localhostProfile:",
		"spec.containers[0].securityContext.appArmorProfile.type:"}},
	{"lifecycle", "initContainers: [{name: i, image: b, lifecycle: {preStop: {sleep: {seconds: 1}}}}]\n" +
		one("lifecycle: {stopSignal: SIGNOPE, preStop: {exec: {command: []}}, postStart: {sleep: {seconds: -1}}}"), []string{
		"spec.initContainers[0].lifecycle:", "spec.containers[0].lifecycle.postStart.sleep.seconds:",
		"spec.containers[0].lifecycle.preStop.exec.command:", "spec.containers[0].lifecycle.stopSignal:"}},
	{"aliases and grace", "terminationGracePeriodSeconds: -1\nhostAliases: [{ip: x, hostnames: [\"a b\"]}]\n" + one(""), []string{
		"spec.terminationGracePeriodSeconds:", "spec.hostAliases[0].ip:", "spec.hostAliases[0].hostnames[0]:"}},
}

func TestUnsupportedFieldsAreRefused(t *testing.T) {
	t.Parallel()
	for _, test := range refusals {
		t.Run(test.name, func(t *testing.T) {
			comparePrefixes(t, problems(t, manifest(test.spec), Mode{}), test.want)
		})
	}
}

func comparePrefixes(t *testing.T, got, want []string) {
	t.Helper()
	ok := len(got) == len(want)
	for i := range min(len(got), len(want)) {
		ok = ok && strings.HasPrefix(got[i], want[i])
	}
	if !ok {
		t.Errorf("refused for:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestInvalidDocumentsAreRefused(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, text, want string }{
		{"unknown fields", manifest("hostNetwrk: true\n" + one("imagePullPolcy: Never")), `unknown field "spec.hostNetwrk", did you mean hostNetwork?`},
		{"unknown fields, all", manifest("hostNetwrk: true\n" + one("imagePullPolcy: Never")), `unknown field "spec.containers[0].imagePullPolcy", did you mean imagePullPolicy?`},
		{"unknown field of metadata", strings.Replace(manifest(one("")), "name: web", "name: web\n  label: {}", 1), `unknown field "metadata.label", did you mean labels?`},
		{"unknown field in a list", manifest(one("volumeMounts: [{name: a, mounthPath: /a}]")), `unknown field "spec.containers[0].volumeMounts[0].mounthPath", did you mean mountPath?`},
		{"case", manifest("hostnetwork: true\n" + one("")), `unknown field "spec.hostnetwork", did you mean hostNetwork?`},
		{"duplicate key", manifest("hostPID: true\nhostPID: true\n" + one("")), "already set"},
		{"nothing to run", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n", "nothing to run: want a Pod, Deployment, StatefulSet, DaemonSet, Job or CronJob; the manifest has Service web"},
		{"old version", "apiVersion: extensions/v1beta1\nkind: Deployment\n", `apiVersion "extensions/v1beta1" is not supported, want apps/v1`},
		{"no kind", "metadata: {name: web}\n", "needs apiVersion and kind"},
		{"two pods of one name", manifest(one("")) + "---\n" + manifest(one("")), "Pod web: its pod has the same name as that of Pod web"},
		{"second document after its end", manifest(one("")) + "...\n" + manifest(one("")), "read manifest"},
		{"empty", "# nothing\n", "the manifest is empty"},
		{"not an object", "[1, 2]", "must be an object"},
		{"quantity", manifest(one("resources: {limits: {memory: 64Mb}}")), `spec.containers[0].resources.limits.memory: "64Mb" is not a quantity; write for example 64Mi`},
		{"quantity of CPUs", manifest(one("resources: {limits: {cpu: 1x}}")), `limits.cpu: "1x" is not a quantity; write for example 500m or 2`},
		{"quantity of a volume", manifest("volumes: [{name: v, emptyDir: {sizeLimit: 1 GB}}]\n" + one("")), `spec.volumes[0].emptyDir.sizeLimit: "1 GB" is not a quantity; write for example 1Gi`},
		{"type", manifest("hostPID: 3\n" + one("")), "cannot unmarshal"},
		{"not yaml", "a: [", "read manifest"},
		{"namespace", strings.Replace(manifest(one("")), "name: web", "name: web\n  namespace: a/b", 1), `metadata.namespace: "a/b"`},
		{"metadata name", strings.Replace(manifest(one("")), "name: web", "name: ../web", 1), `metadata.name: "../web"`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse([]byte(test.text), Mode{})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestOneDocumentWithMarkers(t *testing.T) {
	t.Parallel()
	if _, err := Parse([]byte("---\n"+manifest(one(""))+"---\n"), Mode{}); err != nil {
		t.Error(err)
	}
}

func TestDetachedPodWarnsOfRestartsAndProbes(t *testing.T) {
	t.Parallel()
	text := manifest("restartPolicy: OnFailure\ninitContainers: [{name: s, image: b, restartPolicy: Always}]\n" + one("livenessProbe: {exec: {command: [x]}}"))
	m, err := Parse([]byte(text), Mode{Detached: true})
	want := []string{"spec.restartPolicy, spec.initContainers[0].restartPolicy, spec.containers[0].livenessProbe: ignored: " + noProcess}
	if err != nil || !slices.Equal(m.Warnings, want) {
		t.Errorf("warnings %+v, %v, want %q", m, err, want)
	}
	comparePrefixes(t, problems(t, text, Mode{Detached: true, Strict: true}), []string{
		"spec.restartPolicy: ", "spec.initContainers[0].restartPolicy: ", "spec.containers[0].livenessProbe: "})
	if got := problems(t, manifest(one("")), Mode{Detached: true, Strict: true}); got != nil {
		t.Errorf("a manifest without a restartPolicy is refused: %q", got)
	}
}

func TestIgnoredFieldsAreOneWarning(t *testing.T) {
	t.Parallel()
	text := manifest("nodeName: node-1\nnodeSelector: {disk: ssd}\ntolerations: [{operator: Exists}]\npriority: 5\nserviceAccountName: me\n"+
		"dnsPolicy: ClusterFirst\n"+one("resources: {limits: {ephemeral-storage: 1Gi}}")) +
		"---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\n---\napiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: web}\n"
	m, err := Parse([]byte(text), Mode{})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"Service web, Ingress web: ignored: " + onlyPods,
		"spec.dnsPolicy: ignored: " + noDNS,
		"spec.containers[0].resources.limits.ephemeral-storage, spec.containers[0].resources.requests.ephemeral-storage: ignored: " + notEnforced,
		"spec.nodeSelector, spec.nodeName, spec.tolerations, spec.priority: ignored: " + noSchedule,
		"spec.serviceAccountName: ignored: " + noAPI,
	}
	want[2] = "spec.containers[0].resources.limits.ephemeral-storage: ignored: " + notEnforced
	slices.Sort(want)
	slices.Sort(m.Warnings)
	if !slices.Equal(m.Warnings, want) {
		t.Errorf("warnings:\n%s\nwant:\n%s", strings.Join(m.Warnings, "\n"), strings.Join(want, "\n"))
	}
	if got := problems(t, text, Mode{Strict: true}); len(got) != 9 {
		t.Errorf("with --strict refused for %q, want 9 problems", got)
	}
}

func TestParseSetsAPIServerDefaults(t *testing.T) {
	t.Parallel()
	pod := parsePod(t, manifest("containers: [{name: a, image: b}, {name: c, image: 'b:latest'}, {name: d, image: 'b:1', ports: [{containerPort: 1}], resources: {limits: {cpu: '1', memory: 1Gi}, requests: {cpu: 10m}}}, "+
		"{name: e, image: 'host:5000/b'}, {name: f, image: 'b@sha256:"+strings.Repeat("0", 64)+"'}]"))
	if pod.Namespace != "default" || pod.Spec.RestartPolicy != corev1.RestartPolicyAlways || *pod.Spec.TerminationGracePeriodSeconds != 30 {
		t.Errorf("namespace %q, restart policy %q, grace %d", pod.Namespace, pod.Spec.RestartPolicy, *pod.Spec.TerminationGracePeriodSeconds)
	}
	for i, want := range []corev1.PullPolicy{"Always", "Always", "IfNotPresent", "Always", "IfNotPresent"} {
		if got := pod.Spec.Containers[i].ImagePullPolicy; got != want {
			t.Errorf("pull policy of %s: %s, want %s", pod.Spec.Containers[i].Image, got, want)
		}
	}
	c := pod.Spec.Containers[2]
	if c.Ports[0].Protocol != corev1.ProtocolTCP || c.Resources.Requests.Memory().String() != "1Gi" || c.Resources.Requests.Cpu().String() != "10m" {
		t.Errorf("ports %v, requests %v", c.Ports, c.Resources.Requests)
	}
}

func FuzzParse(f *testing.F) {
	for _, spec := range []string{
		one(""), one("env: [{name: A, value: $(B)}]"), "volumes: [{name: v, emptyDir: {}}]\n" + one("volumeMounts: [{name: v, mountPath: /x}]"),
		"securityContext: {sysctls: [{name: a.b, value: c}]}\n" + one("resources: {limits: {hugepages-2Mi: 4Mi}}"),
	} {
		f.Add([]byte(manifest(spec)))
	}
	f.Add([]byte(application))
	host := Host{NodeName: "node", CPUs: 2, Memory: 1 << 30}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := Parse(text, Mode{})
		if err != nil {
			return
		}
		for _, w := range m.Workloads {
			plan := &Plan{Pod: w.Pod, UID: "u", Host: host, Objects: m.Objects, LogDir: "/logs"}
			exercise(t, plan)
		}
	})
}

func TestUnknownFieldsAreExplained(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]string{
		`unknown field "spec.comand"`:                   "",
		`unknown field "spec.containers[3].comand"`:     ", did you mean command?",
		`unknown field "spec.securitycontext"`:          ", did you mean securityContext?",
		`unknown field "spec.frobnicator"`:              "",
		`unknown field "spec.nodeSelector.a.b"`:         "",
		`unknown field "metadata.annotation"`:           ", did you mean annotations?",
		`duplicate field "spec.nodeName"`:               "",
		`unknown field "spec.containers[0].Image"`:      ", did you mean image?",
		`unknown field "spec.containers[0].lifecyle"`:   ", did you mean lifecycle?",
		`unknown field "spec.containers[0].ports[0].p"`: "",
		`unknown field "kinds"`:                         ", did you mean kind?",
	} {
		if got := explainField(message, reflect.TypeFor[*corev1.Pod]()); got != message+want {
			t.Errorf("%s", got)
		}
	}
}
