package operator

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/cmd/berth/client/clienttest"
	"berth/internal/criu"
	"berth/internal/testutil"
)

// Sizes are those of the container's own files; the pod's are only in the sum.
func TestDescribeCheckpoint(t *testing.T) {
	t.Parallel()
	m := savedPod(t, nil, nil)
	m.Files = []archive.File{{Path: "app/spec.dump", Size: 1}, {Path: "app/checkpoint/pages-1.img", Size: 4096},
		{Path: "app/checkpoint/core-1.img", Size: 20}, {Path: "devshm.tar", Size: 300}, {Path: "other/pages-1.img", Size: 5000}}
	m.Node = archive.Node{Berth: "0.3\x1b[2J", CRIU: 40201, Kernel: "6.1", Architecture: "amd64"}
	plan, err := newRestorePlan(m, podIdentity{})
	if err != nil {
		t.Fatal(err)
	}
	plan.signer = archive.OtherNode
	i := describeCheckpoint(plan)
	if i.Pod != "shop/web" || i.Handler != "crun" || i.Size != 9417 || i.SignedBy != "another node" {
		t.Errorf("%+v", i)
	}
	if c := i.Containers; len(c) != 1 || c[0].Name != "app" || c[0].Size != 4117 || c[0].Memory != 4096 || c[0].ImageID != testImageID {
		t.Errorf("containers %+v", c)
	}
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	i.Prevents = []string{"a reason"}
	if err := i.print(cmd); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"shop/web", "busybox (6d5f7a0b3c1e)", "CRIU 4.2.1", "another node", "no: a reason"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Errorf("a text of the checkpoint controls the terminal: %q", &out)
	}
}

// Each thing that a node lacks prevents a restore, and is named.
func TestCheckpointPrevents(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		change func(*restoringNode, *restorePlan)
		want   string
	}{
		{"nothing", func(*restoringNode, *restorePlan) {}, ""},
		{"signer", func(_ *restoringNode, p *restorePlan) { p.signer = archive.OtherNode }, "signed by another node"},
		{"restores are off", func(n *restoringNode, _ *restorePlan) { n.settings.CheckpointRestore = "off" }, "checkpoint.restore is off"},
		{"restores are off, sandbox", func(n *restoringNode, p *restorePlan) { ofSandbox(n, p); n.settings.CheckpointRestore = "off" }, ""},
		{"CRIU", func(n *restoringNode, _ *restorePlan) { n.criu = "no CRIU" }, "no CRIU"},
		{"architecture", func(_ *restoringNode, p *restorePlan) { p.manifest.Node.Architecture = "other" }, "made on other"},
		{"handler", func(n *restoringNode, _ *restorePlan) { n.handlers = []string{""} }, `no runtime handler "crun"`},
		{"program of the handler", func(n *restoringNode, _ *restorePlan) { n.programs = map[string]string{"crun": "crun 1"} },
			`handler "crun" of this node is not berth's own`},
		{"sandbox", func(n *restoringNode, p *restorePlan) { ofSandbox(n, p); n.criu = "no CRIU" }, ""},
		{"version of the sandbox", func(n *restoringNode, p *restorePlan) { ofSandbox(n, p); p.manifest.Runtime = "runsc 2" },
			`"runsc 2" made it, and the runtime handler "crun" of this node has "runsc 1"`},
		{"sandbox without handler", func(n *restoringNode, p *restorePlan) { ofSandbox(n, p); n.programs = nil }, `has "berth's own runtime"`},
		{"signer of a sandbox", func(n *restoringNode, p *restorePlan) {
			ofSandbox(n, p)
			p.signer = archive.OtherNode
		}, "signed by another node"},
		{"image", func(n *restoringNode, _ *restorePlan) { n.images = nil }, "image busybox (6d5f7a0b3c1e) of container app"},
		{"user namespace of a sandbox", func(n *restoringNode, p *restorePlan) {
			ofSandbox(n, p)
			p.sandbox.Linux.SecurityContext = &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{
				UsernsOptions: &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD}}}
		}, "user namespace"},
		{"propagation", func(_ *restoringNode, p *restorePlan) {
			p.containers[0].Mounts = []*runtimeapi.Mount{{ContainerPath: "/v", Propagation: runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL}}
		}, "propagation"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			plan, err := newRestorePlan(savedPod(t, nil, nil), podIdentity{})
			if err != nil {
				t.Fatal(err)
			}
			plan.signer, plan.manifest.Node.Architecture = archive.ThisNode, runtime.GOARCH
			node := &restoringNode{handlers: []string{"", "crun"}, images: []string{testImageID}}
			test.change(node, plan)
			got := node.prevents(plan)
			if test.want == "" && len(got) > 0 || test.want != "" && (len(got) != 1 || !strings.Contains(got[0], test.want)) {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

// ofSandbox makes the checkpoint one of a sandbox, which the node can restore.
func ofSandbox(n *restoringNode, p *restorePlan) {
	p.manifest.Runtime, n.programs = "runsc 1", map[string]string{"crun": "runsc 1"}
}

// An older CRIU and a processor with fewer features are doubts, but no reasons.
func TestCheckpointDoubts(t *testing.T) {
	t.Parallel()
	here := restoringNode{version: criu.Version{Major: 4, Minor: 2, Sub: 1}, features: []string{"avx", "sse"}}
	for _, test := range []struct {
		name   string
		change func(*restoringNode, *archive.Node)
		want   string
	}{
		{"same", func(*restoringNode, *archive.Node) {}, ""},
		{"older checkpoint", func(_ *restoringNode, n *archive.Node) { n.CRIU = 40101 }, ""},
		{"newer checkpoint", func(_ *restoringNode, n *archive.Node) { n.CRIU = 40300 }, "CRIU 4.2.1 is older than 4.3"},
		{"no CRIU", func(n *restoringNode, from *archive.Node) { n.version, n.criu = criu.Version{}, "missing" }, ""},
		{"kernel", func(n *restoringNode, _ *archive.Node) { n.kernel = "6.2" }, "Linux 6.2, and 6.1 wrote it"},
		{"kernel of a sandbox", func(n *restoringNode, from *archive.Node) { n.kernel, from.CRIU = "6.2", 0 }, ""},
		{"features", func(_ *restoringNode, n *archive.Node) { n.CPUFeatures = append(n.CPUFeatures, "avx512f") }, "lacks avx512f"},
		{"unknown features", func(n *restoringNode, _ *archive.Node) { n.features = nil }, ""},
		{"features of another architecture", func(_ *restoringNode, n *archive.Node) { n.Architecture, n.CPUFeatures = "other", []string{"neon"} }, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			node, from := here, archive.Node{CRIU: 40201, Kernel: "6.1", Architecture: runtime.GOARCH, CPUFeatures: []string{"sse"}}
			test.change(&node, &from)
			got := node.doubts(from)
			if test.want == "" && len(got) > 0 || test.want != "" && (len(got) != 1 || !strings.Contains(got[0], test.want)) {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

// savedFile writes a checkpoint of a pod, signed by the node with that root directory.
func savedFile(t *testing.T, root string) string {
	t.Helper()
	key, err := archive.LoadKey(root)
	testutil.Must(t, err)
	dir := t.TempDir()
	testutil.Must(t, os.MkdirAll(filepath.Join(dir, "app/checkpoint"), 0o700))
	for _, name := range []string{"config.dump", "spec.dump", "checkpoint/inventory.img", "checkpoint/descriptors.json"} {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, "app", name), []byte("{}"), 0o600))
	}
	open, err := os.Open(dir)
	testutil.Must(t, err)
	defer open.Close()
	m := savedPod(t, nil, nil)
	m.Pod.Handler, m.Node = "", archive.Node{Berth: "0.3", CRIU: 40201, Kernel: "6.1", Architecture: runtime.GOARCH}
	testutil.Must(t, archive.Seal(t.Context(), open, m, key, nil, false))
	return dir
}

// nodeConsole is a console of a runtime with that root directory and checkpoint.restore, a CRIU and
// the image of savedPod.
func nodeConsole(t *testing.T, root, restore string) *console {
	t.Helper()
	program := filepath.Join(t.TempDir(), "criu")
	testutil.Must(t, os.WriteFile(program, []byte("#!/bin/sh\necho Version: 4.2.1\n"), 0o700))
	config, err := json.Marshal(map[string]any{"Root": root, "CheckpointCRIU": program, "CheckpointRestore": restore, "DefaultHandler": "berth"})
	testutil.Must(t, err)
	c := newConsole(t, &clienttest.Server{Config: string(config)})
	c.Registry["busybox"] = &runtimeapi.Image{Id: testImageID, RepoTags: []string{"busybox:latest"}}
	return c
}

// The command says what a checkpoint contains, who signed it, and what prevents a restore here.
func TestCheckpointInspectCommand(t *testing.T) {
	root := t.TempDir()
	file := savedFile(t, root)
	c := nodeConsole(t, root, "trusted")
	stdout, stderr, code := c.do("checkpoint", "inspect", file)
	for _, want := range []string{"shop/web", "app: busybox (6d5f7a0b3c1e)", "signed by", "this node", "no: image busybox (6d5f7a0b3c1e) of container app is not on this node"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if code != 1 || stderr != "" {
		t.Errorf("without the image: exit code %d, %s", code, stderr)
	}
	c.must("pull", "busybox")
	if out := c.must("checkpoint", "inspect", file); !strings.Contains(out, "possible") {
		t.Errorf("with the image:\n%s", out)
	}
	other := nodeConsole(t, t.TempDir(), "trusted")
	other.must("pull", "busybox")
	stdout, _, code = other.do("checkpoint", "inspect", file, "-o", "json")
	var found checkpointInfo
	if err := json.Unmarshal([]byte(stdout), &found); err != nil || code != 1 {
		t.Fatalf("%v, exit code %d:\n%s", err, code, stdout)
	}
	if found.SignedBy == "this node" || len(found.Prevents) != 1 || !strings.Contains(found.Prevents[0], "signed by another node") {
		t.Errorf("on another node: %+v", found)
	}
}

// A restored pod gets the cgroup that the user chooses, never that of the checkpoint.
func TestRestoreCommand(t *testing.T) {
	root := t.TempDir()
	file := savedFile(t, root)
	for _, test := range []struct {
		args []string
		want string
	}{{nil, ""}, {[]string{"--cgroup-parent", "/berth.slice"}, "/berth.slice"}} {
		c := nodeConsole(t, root, "trusted")
		c.must(append([]string{"restore", file, "--run-dir", c.runDir, "--name", "copy"}, test.args...)...)
		configs := c.PodConfigs()
		if len(configs) != 1 || configs[0].GetLinux().GetCgroupParent() != test.want || configs[0].GetMetadata().GetName() != "copy" {
			t.Errorf("%q: pods %v", test.args, configs)
		}
		if want := []string{"RestorePod copy", "StartContainer app/0"}; !slices.Equal(c.Calls(), want) {
			t.Errorf("calls %q, want %q", c.Calls(), want)
		}
	}
}

// While restores are off, the commands say so, also those that restore nothing.
func TestRestoreCommandOff(t *testing.T) {
	root := t.TempDir()
	file := savedFile(t, root)
	for _, args := range [][]string{{"restore", file}, {"restore", file, "--dry-run"}, {"checkpoint", "inspect", file}} {
		c := nodeConsole(t, root, "off")
		c.must("pull", "busybox")
		stdout, stderr, code := c.do(args...)
		if code != 1 || !strings.Contains(stdout+stderr, "checkpoint.restore is off") || !strings.Contains(stdout+stderr, "web") {
			t.Errorf("%q: exit code %d\n%s%s", args, code, stdout, stderr)
		}
		if slices.ContainsFunc(c.Calls(), func(call string) bool { return strings.HasPrefix(call, "RestorePod") }) {
			t.Errorf("%q: calls %q", args, c.Calls())
		}
	}
}
