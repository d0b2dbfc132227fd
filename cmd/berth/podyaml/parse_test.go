package podyaml

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
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

var refusals = []struct {
	name string
	spec string
	want []string // prefix of each problem
}{
	{"nothing", one(""), nil},
	{"explicit zero values", "hostNetwork: false\nnodeName: ''\nimagePullSecrets: []\nnodeSelector: {}\n" + one(""), nil},
	{"fields that hold anyway", "tolerations: [{operator: Exists}]\nenableServiceLinks: true\nautomountServiceAccountToken: false\nos: {name: linux}\nhostUsers: true\n" + one(""), nil},
	{"all at once", `
serviceAccountName: me
nodeSelector: {disk: ssd}
affinity: {nodeAffinity: {}}
activeDeadlineSeconds: 5
volumes:
- {name: a, secret: {secretName: s}}
- {name: b, persistentVolumeClaim: {claimName: c}}
- {name: c, emptyDir: {}}
containers:
- name: app
  image: busybox
  envFrom: [{configMapRef: {name: m}}]
  env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}]
  livenessProbe: {}
  stdin: true
  lifecycle: {postStart: {httpGet: {port: 80}}}`, []string{
		"spec.volumes[0].secret: there is no API server",
		"spec.volumes[1].persistentVolumeClaim: there is no API server",
		"spec.containers[0].envFrom: there is no API server",
		"spec.containers[0].env[0].valueFrom.secretKeyRef: there is no API server",
		"spec.containers[0].livenessProbe: probes are not run",
		"spec.containers[0].lifecycle.postStart.httpGet: only exec and sleep",
		"spec.containers[0].stdin: nothing is attached",
		"spec.activeDeadlineSeconds: not supported",
		"spec.nodeSelector: this command does not schedule pods",
		"spec.serviceAccountName: there is no API server",
		"spec.affinity: this command does not schedule pods",
	}},
	{"windows and probes in init containers", "initContainers: [{name: i, image: b, readinessProbe: {exec: {command: [x]}}, securityContext: {windowsOptions: {}}}]\n" + one(""), []string{
		"spec.initContainers[0].readinessProbe: probes", "spec.initContainers[0].securityContext.windowsOptions: not supported"}},
	{"ephemeral containers", "ephemeralContainers: [{name: d, image: b}]\n" + one(""), []string{"spec.ephemeralContainers: not supported"}},
	{"restart policy of an ordinary container", one("restartPolicy: Always"), []string{"spec.containers[0].restartPolicy: not supported"}},
	{"service account token", "automountServiceAccountToken: true\n" + one(""), []string{"spec.automountServiceAccountToken: true"}},
	{"user namespace", "hostUsers: false\nhostNetwork: true\n" + one(""), nil},
	{"user namespace beside the host's", "hostUsers: false\nhostPID: true\nhostIPC: true\n" + one(""), []string{
		"spec.hostUsers: false: not possible with hostPID", "spec.hostUsers: false: not possible with hostIPC"}},
	{"dns", "dnsPolicy: ClusterFirst\n" + one(""), []string{`spec.dnsPolicy: "ClusterFirst" is not possible here, want Default or None`}},
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
		"spec.volumes[0]: has no source", "spec.volumes[1].emptyDir.sizeLimit: can only be kept with medium Memory",
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
		{"unknown fields", manifest("hostNetwrk: true\n" + one("imagePullPolcy: Never")), `unknown field "spec.hostNetwrk"`},
		{"unknown fields, all", manifest("hostNetwrk: true\n" + one("imagePullPolcy: Never")), `unknown field "spec.containers[0].imagePullPolcy"`},
		{"case", manifest("hostnetwork: true\n" + one("")), `unknown field "spec.hostnetwork"`},
		{"duplicate key", manifest("hostPID: true\nhostPID: true\n" + one("")), "already set"},
		{"not a pod", "apiVersion: apps/v1\nkind: Deployment\n", `kind "Deployment"`},
		{"two documents", manifest(one("")) + "---\n" + manifest(one("")), "2 documents"},
		{"empty", "# nothing\n", "0 documents"},
		{"type", manifest("hostPID: 3\n" + one("")), "cannot unmarshal"},
		{"not yaml", "a: [", "read manifest"},
		{"metadata", strings.Replace(manifest(one("")), "name: web", "name: ../web\n  namespace: a/b\n  uid: x\n  generateName: g", 1), "metadata.uid: every run has a uid of its own"},
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

func TestDetachedPodRefusesRestarts(t *testing.T) {
	t.Parallel()
	text := manifest("restartPolicy: OnFailure\ninitContainers: [{name: s, image: b, restartPolicy: Always}]\n" + one(""))
	comparePrefixes(t, problems(t, text, Mode{Detached: true}), []string{"spec.restartPolicy: OnFailure", "spec.initContainers[0].restartPolicy: Always"})
	if got := problems(t, manifest(one("")), Mode{Detached: true}); got != nil {
		t.Errorf("a manifest without a restartPolicy is refused: %q", got)
	}
}

func TestParseSetsAPIServerDefaults(t *testing.T) {
	t.Parallel()
	pod, err := Parse([]byte(manifest("containers: [{name: a, image: b}, {name: c, image: 'b:latest'}, {name: d, image: 'b:1', ports: [{containerPort: 1}], resources: {limits: {cpu: '1', memory: 1Gi}, requests: {cpu: 10m}}}, "+
		"{name: e, image: 'host:5000/b'}, {name: f, image: 'b@sha256:"+strings.Repeat("0", 64)+"'}]")), Mode{})
	if err != nil {
		t.Fatal(err)
	}
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

// The encoded form of a parsed pod must parse to the same pod, because a detached pod's manifest is
// stored in that form.
func TestParseIsStable(t *testing.T) {
	t.Parallel()
	for _, text := range examples(t) {
		pod, err := Parse(text, Mode{})
		if err != nil {
			t.Fatal(err)
		}
		again, err := yaml.Marshal(pod)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(again, Mode{}); err != nil {
			t.Errorf("%s\n%v", again, err)
		}
	}
}

// examples returns the manifests in contrib/examples, which must all be accepted.
func examples(t *testing.T) map[string][]byte {
	t.Helper()
	names, err := filepath.Glob("../../../contrib/examples/*.yaml")
	if err != nil || len(names) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	out := map[string][]byte{}
	for _, name := range names {
		if out[filepath.Base(name)], err = os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func FuzzParse(f *testing.F) {
	for _, spec := range []string{
		one(""), one("env: [{name: A, value: $(B)}]"), "volumes: [{name: v, emptyDir: {}}]\n" + one("volumeMounts: [{name: v, mountPath: /x}]"),
		"securityContext: {sysctls: [{name: a.b, value: c}]}\n" + one("resources: {limits: {hugepages-2Mi: 4Mi}}"),
	} {
		f.Add([]byte(manifest(spec)))
	}
	host := Host{NodeName: "node", CPUs: 2, Memory: 1 << 30}
	f.Fuzz(func(t *testing.T, text []byte) {
		pod, err := Parse(text, Mode{})
		if err != nil {
			return
		}
		p := &Plan{Pod: pod, UID: "u", Host: host, LogDir: "/logs"}
		p.Sandbox()
		for _, c := range p.Containers() {
			_, _ = p.Container(c, Run{Source: func(Container, int, string) (string, error) { return "/x", nil }}) // must not panic
		}
	})
}
