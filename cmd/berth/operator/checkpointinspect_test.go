package operator

import (
	"bytes"
	"runtime"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/archive"
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
		{"signer", func(_ *restoringNode, p *restorePlan) { p.signer = archive.OtherNode }, "checkpoint.restore_foreign"},
		{"permitted signer", func(n *restoringNode, p *restorePlan) { p.signer, n.foreign = archive.OtherNode, true }, ""},
		{"CRIU", func(n *restoringNode, _ *restorePlan) { n.criu = "no CRIU" }, "no CRIU"},
		{"architecture", func(_ *restoringNode, p *restorePlan) { p.manifest.Node.Architecture = "other" }, "made on other"},
		{"handler", func(n *restoringNode, _ *restorePlan) { n.handlers = []string{""} }, `no runtime handler "crun"`},
		{"image", func(n *restoringNode, _ *restorePlan) { n.images = nil }, "image busybox (6d5f7a0b3c1e) of container app"},
		{"user namespace", func(_ *restoringNode, p *restorePlan) {
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
