package podyaml

import (
	"errors"
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
func problems(t *testing.T, text string) []string {
	t.Helper()
	_, err := Parse([]byte(text))
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
	m, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return m.Pods[0]
}

var refusals = []struct {
	name string
	spec string
	want []string // prefix of each problem
}{
	{"nothing", one(""), nil},
	{"explicit zero values", "hostNetwork: false\nnodeName: ''\nimagePullSecrets: []\nnodeSelector: {}\n" + one(""), nil},
	{"restarts", "restartPolicy: Always\n" + one(""), []string{"spec.restartPolicy: Always: containers do not restart"}},
	{"no restarts", "restartPolicy: Never\n" + one(""), nil},
	{"all at once", `
runtimeClassName: gvisor
nodeName: node1
tolerations: [{operator: Exists}]
serviceAccountName: me
activeDeadlineSeconds: 5
dnsPolicy: ClusterFirst
hostAliases: [{ip: 192.0.2.9, hostnames: [db]}]
hostPID: true
hostUsers: false
shareProcessNamespace: true
volumes:
- {name: a, secret: {secretName: s}}
- {name: b, persistentVolumeClaim: {claimName: d}}
- {name: c, emptyDir: {mode: 448}}
initContainers: [{name: i, image: b, restartPolicy: Always}]
containers:
- name: app
  image: busybox
  tty: true
  env: [{name: A, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
  livenessProbe: {}
  volumeMounts: [{name: c, mountPath: /c, subPath: x}]
  lifecycle: {postStart: {exec: {command: [a]}}}
  securityContext: {procMount: Unmasked}
ephemeralContainers: [{name: d, image: b}]`, []string{
		"spec.volumes[0].secret: needs a kubelet: see docs/standalone.md", "spec.volumes[1].persistentVolumeClaim: needs a kubelet",
		"spec.volumes[2].emptyDir.mode: needs", "spec.initContainers[0].restartPolicy: needs",
		"spec.containers[0].env[0].valueFrom.fieldRef: needs", "spec.containers[0].volumeMounts[0].subPath: needs",
		"spec.containers[0].livenessProbe: needs", "spec.containers[0].lifecycle: needs", "spec.containers[0].securityContext.procMount: needs",
		"spec.containers[0].tty: needs", "spec.ephemeralContainers: needs",
		"spec.activeDeadlineSeconds: needs", "spec.dnsPolicy: needs", "spec.serviceAccountName: needs", "spec.nodeName: needs", "spec.hostPID: needs",
		"spec.shareProcessNamespace: needs", "spec.tolerations: needs", "spec.hostAliases: needs", "spec.runtimeClassName: needs", "spec.hostUsers: needs",
	}},
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
- {name: g, emptyDir: {}, hostPath: {path: /x}}
` + one(""), []string{
		"spec.volumes[0]: has no source", "spec.volumes[1].emptyDir.sizeLimit: without medium Memory",
		"spec.volumes[2].emptyDir.medium:", "spec.volumes[3].hostPath.path:", "spec.volumes[4].hostPath.path:",
		"spec.volumes[4].hostPath.type:", "spec.volumes[5]: has two sources"}},
	{"mounts", "volumes: [{name: v, emptyDir: {}}]\n" + one(`volumeMounts: [
  {name: none, mountPath: /a}, {name: v, mountPath: rel}, {name: v, mountPath: /d}, {name: v, mountPath: /d/}]`), []string{
		`spec.containers[0].volumeMounts[0].name: there is no volume "none"`, "spec.containers[0].volumeMounts[1].mountPath:",
		"spec.containers[0].volumeMounts[3].mountPath:"}},
	{"env", one(`envFrom: [{configMapRef: {name: m}}, {}, {secretRef: {name: s, optional: true}}],
  env: [{name: 'a=b', value: x}, {name: B, value: x, valueFrom: {secretKeyRef: {name: s, key: k}}}]`), []string{
		`spec.containers[0].envFrom[0]: the manifest has no ConfigMap "m"`, "spec.containers[0].envFrom[1]: needs configMapRef or secretRef",
		"spec.containers[0].env[0].name:", "spec.containers[0].env[1]: has more than one source",
		`spec.containers[0].env[1].valueFrom: the manifest has no Secret "s"`}},
	{"resources", one("resources: {limits: {cpu: '1', hugepages-2Mi: 4Mi}, requests: {memory: '-1', ephemeral-storage: '1'}}"), []string{
		"spec.containers[0].resources.limits.hugepages-2Mi: needs a kubelet", "spec.containers[0].resources.requests.ephemeral-storage: needs",
		"spec.containers[0].resources.requests.hugepages-2Mi: needs", "spec.containers[0].resources.requests.memory:"}},
	{"ports", "containers: [{name: a, image: b, ports: [{containerPort: 80, hostPort: 8080}]}, {name: c, image: b, ports: [{containerPort: 81, hostPort: 8080}, {containerPort: 1, protocol: ICMP}]}]", []string{
		`spec.containers[1].ports[0].hostPort: "/TCP/8080" is there twice`,
		`spec.containers[1].ports[1].protocol: "ICMP"`}},
	{"host network ports", "hostNetwork: true\n" + one("ports: [{containerPort: 80}, {containerPort: 81, hostPort: 82}]"), []string{
		"spec.containers[0].ports[1].hostPort: must be the containerPort"}},
	{"security", "securityContext: {seccompProfile: {type: Localhost}}\n" +
		one("securityContext: {seccompProfile: {type: Localhost, localhostProfile: ../x}, appArmorProfile: {type: Custom}}"), []string{
		"spec.securityContext.seccompProfile.localhostProfile:", "spec.containers[0].securityContext.seccompProfile.localhostProfile:",
		"spec.containers[0].securityContext.appArmorProfile.type:"}},
	{"grace", "terminationGracePeriodSeconds: -1\n" + one(""), []string{"spec.terminationGracePeriodSeconds:"}},
}

func TestUnsupportedFieldsAreRefused(t *testing.T) {
	t.Parallel()
	for _, test := range refusals {
		t.Run(test.name, func(t *testing.T) {
			comparePrefixes(t, problems(t, manifest(test.spec)), test.want)
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
		{"unknown fields", manifest("hostNetwrk: true\n" + one("imagePullPolcy: Never")), `spec.hostNetwrk: unknown field`},
		{"unknown fields, all", manifest("hostNetwrk: true\n" + one("imagePullPolcy: Never")), `spec.containers[0].imagePullPolcy: unknown field`},
		{"case", manifest("hostnetwork: true\n" + one("")), `spec.hostnetwork: unknown field`},
		{"duplicate key", manifest("hostPID: true\nhostPID: true\n" + one("")), "already set"},
		{"another kind", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n", `apiVersion "apps/v1", kind "Deployment": needs a kubelet: see docs/standalone.md`},
		{"another kind beside a pod", manifest(one("")) + "---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\n", `Service web: apiVersion "v1", kind "Service": needs`},
		{"no kind", "metadata: {name: web}\n", `kind "": needs a kubelet`},
		{"no pod", "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n", "there is no Pod in it"},
		{"an export", strings.Replace(manifest(one("")), "name: web", "name: web\n  uid: x", 1) + "status: {phase: Running}\n", "metadata.uid: needs"},
		{"two pods of one name", manifest(one("")) + "---\n" + manifest(one("")), `Pod web: metadata.name: "web" is there twice`},
		{"two secrets of one name", strings.Repeat("apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n---\n", 2), `Secret s: metadata.name: "s" is there twice`},
		{"second document after its end", manifest(one("")) + "...\n" + manifest(one("")), "read manifest"},
		{"empty", "# nothing\n", "the manifest is empty"},
		{"not an object", "[1, 2]", "must be an object"},
		{"quantity", manifest(one("resources: {limits: {memory: 64Mb}}")), "is malformed; write for example"},
		{"type", manifest("hostPID: 3\n" + one("")), "cannot unmarshal"},
		{"not yaml", "a: [", "read manifest"},
		{"namespace", strings.Replace(manifest(one("")), "name: web", "name: web\n  namespace: a/b", 1), `metadata.namespace: "a/b"`},
		{"metadata name", strings.Replace(manifest(one("")), "name: web", "name: ../web", 1), `metadata.name: "../web"`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse([]byte(test.text))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestOneDocumentWithMarkers(t *testing.T) {
	t.Parallel()
	if _, err := Parse([]byte("---\n" + manifest(one("")) + "---\n")); err != nil {
		t.Error(err)
	}
}

func TestParseSetsAPIServerDefaults(t *testing.T) {
	t.Parallel()
	pod := parsePod(t, manifest("containers: [{name: a, image: b}, {name: c, image: 'b:latest'}, {name: d, image: 'b:1', ports: [{containerPort: 1}], resources: {limits: {cpu: '1', memory: 1Gi}, requests: {cpu: 10m}}}, "+
		"{name: e, image: 'host:5000/b'}, {name: f, image: 'b@sha256:"+strings.Repeat("0", 64)+"'}]"))
	if pod.Namespace != "default" || pod.Spec.RestartPolicy != corev1.RestartPolicyNever || *pod.Spec.TerminationGracePeriodSeconds != 30 {
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
		"securityContext: {sysctls: [{name: a.b, value: c}]}\n" + one("resources: {limits: {memory: 4Mi}}"),
	} {
		f.Add([]byte(manifest(spec)))
	}
	host := Host{Memory: 1 << 30}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := Parse(text)
		if err != nil {
			return
		}
		for _, pod := range m.Pods {
			exercise(t, &Plan{Pod: pod, UID: "u", Host: host, Objects: m.Objects, LogDir: "/logs"})
		}
	})
}

// exercise makes all requests of a plan.
func exercise(t *testing.T, p *Plan) {
	p.Sandbox()
	p.EtcHosts([]string{"10.0.0.2"})
	for _, c := range p.Containers() {
		if _, err := p.Container(c, testRun); err != nil && !strings.Contains(err.Error(), "runAsNonRoot") {
			t.Errorf("a checked container: %v", err)
		}
	}
}
