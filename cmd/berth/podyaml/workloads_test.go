package podyaml

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// template returns a workload with a pod template whose pod has the given spec, in flow style.
func template(apiVersion, kind, spec, pod string) string {
	return "apiVersion: " + apiVersion + "\nkind: " + kind + "\nmetadata: {name: w}\nspec:\n  " +
		strings.ReplaceAll(strings.TrimSpace(spec), "\n", "\n  ") + "\n  template: {metadata: {labels: {app: w}}, spec: {" + pod + "}}\n"
}

const onePod = "containers: [{name: app, image: busybox}]"

func TestWorkloadsBecomePods(t *testing.T) {
	t.Parallel()
	job := func(spec string) string {
		return template("batch/v1", "Job", spec, "restartPolicy: Never, "+onePod)
	}
	tests := []struct {
		name, text string
		pod        string // name of the pod; empty: refused or skipped
		job        *Job
		warnings   string
		refused    string
	}{
		{"deployment", template("apps/v1", "Deployment", "replicas: 1", onePod), "w", nil, "", ""},
		{"replicas", template("apps/v1", "Deployment", "replicas: 3", onePod), "w", nil, "spec.replicas: ignored: this command runs one replica", ""},
		{"no replicas", template("apps/v1", "Deployment", "replicas: 0", onePod), "", nil, "Deployment w: ignored: it has 0 replicas", ""},
		{"stateful set", template("apps/v1", "StatefulSet", "serviceName: w", onePod), "w-0", nil, "", ""},
		{"daemon set", template("apps/v1", "DaemonSet", "selector: {}", onePod), "w", nil, "", ""},
		{"replica set", template("apps/v1", "ReplicaSet", "selector: {}", onePod), "w", nil, "", ""},
		{"replication controller", template("v1", "ReplicationController", "replicas: 1", onePod), "w", nil, "", ""},
		{"job", job("backoffLimit: 2\nactiveDeadlineSeconds: 5"), "w", &Job{1, 1, 2, 5 * time.Second}, "", ""},
		{"parallel job", job("completions: 5\nparallelism: 2"), "w", &Job{5, 2, 6, 0}, "", ""},
		{"work queue", job("parallelism: 2"), "w", &Job{2, 2, 6, 0}, "", ""},
		{"job that restarts", template("batch/v1", "Job", "backoffLimit: 1", onePod), "", nil, "", `spec.template.spec.restartPolicy: "" is not possible in a Job`},
		{"indexed job", job("completionMode: Indexed"), "", nil, "", "spec.completionMode: Indexed is not supported"},
		{"suspended job", job("suspend: true"), "", nil, "", "spec.suspend: not supported"},
		{"too many completions", job("completions: 100000"), "", nil, "", "spec.completions: 100000 is not between 1 and 1000"},
		{
			"cron job", "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: w}\nspec:\n  schedule: '@daily'\n" +
				"  jobTemplate: {spec: {template: {spec: {restartPolicy: OnFailure, " + onePod + "}}}}\n",
			"w", &Job{1, 1, 6, 0}, "spec.schedule: ignored: the job runs once, now", "",
		},
		{"path of a problem", template("apps/v1", "Deployment", "replicas: 1", "hostPID: true, shareProcessNamespace: true, "+onePod), "", nil, "",
			"spec.template.spec.shareProcessNamespace: cannot be set with hostPID"},
		{"path of a quantity", template("apps/v1", "Deployment", "replicas: 1", "containers: [{name: a, image: b, resources: {requests: {cpu: 1k5}}}]"), "", nil, "",
			`spec.template.spec.containers[0].resources.requests.cpu: "1k5" is not a quantity; write for example 500m or 2`},
		{"unknown field", template("apps/v1", "Deployment", "replica: 1", onePod), "", nil, "", `unknown field "spec.replica", did you mean replicas?`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			m, err := Parse([]byte(test.text), Mode{})
			if test.refused != "" {
				if err == nil || !strings.Contains(err.Error(), test.refused) {
					t.Errorf("error %v, want %q", err, test.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			same(t, "warnings", strings.Join(m.Warnings, "\n"), test.warnings)
			if test.pod == "" {
				same(t, "workloads", len(m.Workloads), 0)
				return
			}
			w := m.Workloads[0]
			same(t, "pod", w.Pod.Namespace+"/"+w.Pod.Name, "default/"+test.pod)
			same(t, "job", w.Job, test.job)
		})
	}
}

// application uses every way of passing ConfigMaps and Secrets to a container.
const application = `
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: conf}, data: {MODE: fast, app.ini: "[app]"}, binaryData: {raw: AAE=}}
- {apiVersion: v1, kind: Secret, metadata: {name: key}, data: {PASSWORD: c2VjcmV0}, stringData: {USER: me}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: db
spec:
  volumeClaimTemplates: [{metadata: {name: data}, spec: {resources: {requests: {storage: 1Gi}}}}]
  template:
    metadata: {labels: {b: "2", a: "1"}}
    spec:
      volumes:
      - {name: conf, configMap: {name: conf}}
      - {name: key, secret: {secretName: key, items: [{key: USER, path: login/user, mode: 256}], defaultMode: 384}}
      - {name: none, configMap: {name: none, optional: true}}
      - name: all
        projected:
          sources:
          - configMap: {name: conf, items: [{key: MODE, path: mode}]}
          - secret: {name: key}
          - downwardAPI:
              items:
              - {path: labels, fieldRef: {fieldPath: metadata.labels}}
              - {path: memory, resourceFieldRef: {containerName: db, resource: limits.memory, divisor: 1Mi}}
      - {name: model, image: {reference: "registry.test/model:1"}}
      containers:
      - name: db
        image: busybox
        args: [$(P_MODE), $(USER)]
        resources: {limits: {memory: 64Mi}}
        envFrom: [{configMapRef: {name: conf}, prefix: P_}, {secretRef: {name: key}}, {configMapRef: {name: none, optional: true}}]
        env:
        - {name: USER, value: you}
        - {name: KEY, valueFrom: {secretKeyRef: {name: key, key: PASSWORD}}}
        - {name: UNSET, valueFrom: {configMapKeyRef: {name: conf, key: none, optional: true}}}
        volumeMounts:
        - {name: data, mountPath: /data}
        - {name: key, mountPath: /key}
        - {name: model, mountPath: /model, subPath: weights}
`

// exercise makes all requests of a plan.
func exercise(t *testing.T, p *Plan) {
	t.Helper()
	p.Sandbox()
	p.EtcHosts(nil)
	for i := range p.Pod.Spec.Volumes {
		if _, err := p.VolumeFiles(&p.Pod.Spec.Volumes[i]); err != nil {
			t.Errorf("a volume of an accepted manifest: %v", err)
		}
	}
	for _, c := range p.Containers() {
		_, _ = p.Container(c, Run{Source: func(Container, int, string) (string, error) { return "/x", nil }}) // must not panic
	}
}

func TestConfigMapsAndSecrets(t *testing.T) {
	t.Parallel()
	m, err := Parse([]byte(application), Mode{Strict: true})
	if err != nil {
		t.Fatal(err)
	}
	p := &Plan{Pod: m.Workloads[0].Pod, UID: "uid-1", Host: testHost, Objects: m.Objects}
	run := testRun
	run.VolumeImages = map[string]string{"model": "sha256:model"}
	c, err := p.Container(p.Containers()[0], run)
	if err != nil {
		t.Fatal(err)
	}
	env := map[string]string{}
	for _, e := range c.Envs {
		env[e.Key] = string(e.Value)
	}
	same(t, "env", env, map[string]string{
		"P_MODE": "fast", "P_app.ini": "[app]", "P_raw": "\x00\x01", "USER": "you", "PASSWORD": "secret", "KEY": "secret"})
	same(t, "args", c.Args, []string{"fast", "you"})
	same(t, "claims", m.Objects.Claims(), [][2]string{{"default", "data-db-0"}})
	same(t, "claim is read-only", c.Mounts[0].Readonly, false)
	same(t, "secret is read-only", c.Mounts[1].Readonly, true)
	same(t, "image volume", c.Mounts[2], &runtimeapi.Mount{
		ContainerPath: "/model", Readonly: true, ImageSubPath: "weights",
		Image: &runtimeapi.ImageSpec{Image: "sha256:model", UserSpecifiedImage: "registry.test/model:1"}})
	want := map[string][]File{
		"conf": {{"MODE", []byte("fast"), 0o644}, {"app.ini", []byte("[app]"), 0o644}, {"raw", []byte{0, 1}, 0o644}},
		"key":  {{"login/user", []byte("me"), 0o400}},
		"all": {{"mode", []byte("fast"), 0o644}, {"PASSWORD", []byte("secret"), 0o644}, {"USER", []byte("me"), 0o644},
			{"labels", []byte("a=\"1\"\nb=\"2\""), 0o644}, {"memory", []byte("64"), 0o644}},
	}
	for i := range p.Pod.Spec.Volumes {
		v := &p.Pod.Spec.Volumes[i]
		files, err := p.VolumeFiles(v)
		if err != nil {
			t.Errorf("files of %s: %v", v.Name, err)
		}
		same(t, "files of "+v.Name, files, want[v.Name])
	}
}

func TestMissingKeysAreRefused(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ old, broken, want string }{
		{"name: key, key: PASSWORD", "name: key, key: PASSWRD", `Secret "key" has no key "PASSWRD"`},
		{"key: USER, path", "key: USR, path", `Secret "key" has no key "USR"`},
		{"{secretRef: {name: key}}", "{secretRef: {name: ky}}", `the manifest has no Secret "ky"`},
		{"{app.ini: ", "{../app.ini: ", `ConfigMap conf: data: "../app.ini"`},
	} {
		_, err := Parse([]byte(strings.Replace(strings.Replace(application, "MODE: fast, ", "", 1), test.old, test.broken, 1)), Mode{})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.broken, err, test.want)
		}
	}
}

// kubectlExport resembles the output of kubectl get pod -o yaml.
const kubectlExport = `
apiVersion: v1
kind: List
metadata: {resourceVersion: ""}
items:
- apiVersion: v1
  kind: Pod
  metadata:
    creationTimestamp: "2026-01-01T00:00:00Z"
    generateName: web-
    name: web-abcde
    namespace: shop
    uid: 8f4d4a4e-0000-0000-0000-000000000000
    resourceVersion: "5"
    ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: web, uid: x}]
    managedFields: [{manager: kubectl}]
  spec:
    containers:
    - name: app
      image: busybox
      terminationMessagePath: /dev/termination-log
      terminationMessagePolicy: File
      volumeMounts: [{mountPath: /var/run/secrets/kubernetes.io/serviceaccount, name: kube-api-access-x, readOnly: true}]
    dnsPolicy: ClusterFirst
    enableServiceLinks: true
    nodeName: node-1
    preemptionPolicy: PreemptLowerPriority
    priority: 0
    restartPolicy: Always
    schedulerName: default-scheduler
    serviceAccount: default
    serviceAccountName: default
    tolerations: [{effect: NoExecute, key: node.kubernetes.io/not-ready, operator: Exists}]
    volumes:
    - name: kube-api-access-x
      projected:
        defaultMode: 420
        sources:
        - serviceAccountToken: {expirationSeconds: 3607, path: token}
        - configMap: {items: [{key: ca.crt, path: ca.crt}], name: kube-root-ca.crt}
        - downwardAPI: {items: [{fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}, path: namespace}]}
  status: {phase: Running, unknownField: {}}
`

func TestKubectlExportRuns(t *testing.T) {
	t.Parallel()
	m, err := Parse([]byte(kubectlExport), Mode{})
	if err != nil {
		t.Fatal(err)
	}
	pod := m.Workloads[0].Pod
	same(t, "name", pod.Namespace+"/"+pod.Name, "shop/web-abcde")
	same(t, "volumes and mounts", len(pod.Spec.Volumes)+len(pod.Spec.Containers[0].VolumeMounts), 0)
	scheduling := slices.DeleteFunc(slices.Clone(m.Warnings), func(w string) bool { return !strings.Contains(w, noSchedule) })
	if len(scheduling) != 1 || len(m.Warnings) != 3 {
		t.Errorf("want one warning for scheduling, one for the API server, one for DNS: %q", m.Warnings)
	}
	exercise(t, &Plan{Pod: pod, UID: "u", Host: testHost, Objects: m.Objects})
}

// Every manifest in contrib/examples must be accepted.
func TestExamplesAreAccepted(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob("../../../contrib/examples/*.yaml")
	if err != nil || len(names) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	for _, name := range names {
		t.Run(filepath.Base(name), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			m, err := Parse(text, Mode{})
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range m.Workloads {
				exercise(t, &Plan{Pod: w.Pod, UID: "u", Host: testHost, Objects: m.Objects})
			}
		})
	}
}
