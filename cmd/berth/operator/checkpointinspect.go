package operator

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/internal/criu"
	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/sandbox/handler"
	"berth/sandbox/state"
)

func checkpointInspectCommand(o *Connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect FILE",
		Short: "Show what a checkpoint contains, and what prevents a restore here",
		Long: `Show what a file or directory of "berth checkpoint" says about itself: pod, containers,
images, sizes, who signed it, and where it was made. The command then compares it with
this node and lists what would prevent a restore, and what may make it fail. The exit code
is 1 if something would prevent it.

It reads the manifest only. A restore also checks all other files, and compares the
processes with what berth would create.`,
		Example: "  berth checkpoint inspect web.tar\n  berth checkpoint inspect web.tar -o json",
		Args:    cli.Args(1, 1, "name a file"),
	}
	format := cli.AddOutput(cmd, "table")
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		i, err := inspectCheckpoint(cmd.Context(), c, args[0])
		if err != nil {
			return err
		}
		if !format.JSON() {
			err = i.print(cmd)
		} else {
			err = cli.PrintJSON(cmd.OutOrStdout(), i)
		}
		if err == nil && len(i.Prevents) > 0 {
			err = &cli.ExitStatus{Code: 1}
		}
		return err
	})
	return cmd
}

// checkpointInfo describes a checkpoint. Its texts come from the checkpoint, which may be anyone's.
type checkpointInfo struct {
	Pod        string                `json:"pod,omitempty"` // NAMESPACE/NAME; empty: a checkpoint of one container
	Handler    string                `json:"handler"`
	Runtime    string                `json:"runtime,omitempty"` // version of the runtime that saved its sandbox; empty: CRIU saved it
	Containers []checkpointContainer `json:"containers"`
	CreatedAt  time.Time             `json:"createdAt"`
	SignedBy   string                `json:"signedBy"` // archive.Signer
	Node       archive.Node          `json:"node"`
	Size       int64                 `json:"size"`       // bytes of all files but the manifest
	NodeAccess []string              `json:"nodeAccess"` // resources of the node that the pod would access
	Prevents   []string              `json:"prevents"`   // known reasons why a restore on this node fails
	Doubts     []string              `json:"doubts"`     // what may make a restore on this node fail
}

type checkpointContainer struct {
	Name    string `json:"name"`
	Image   string `json:"image"`
	ImageID string `json:"imageID"`
	Size    int64  `json:"size"`   // bytes of its files
	Memory  int64  `json:"memory"` // bytes of its pages
}

// inspectCheckpoint reads the manifest of a checkpoint and compares it with the node of the daemon.
func inspectCheckpoint(ctx context.Context, c *client.Client, file string) (*checkpointInfo, error) {
	file, err := filepath.Abs(file)
	if err != nil {
		return nil, err
	}
	settings, err := readSettings(ctx, c)
	if err != nil {
		return nil, err
	}
	plan, err := (&restoreOptions{}).plan(file, settings.key())
	if err != nil {
		return nil, err
	}
	i := describeCheckpoint(plan)
	here, err := restoreNode(ctx, c, settings)
	if err != nil {
		return nil, err
	}
	i.Prevents, i.Doubts = here.prevents(plan), here.doubts(plan.manifest.Node)
	return i, nil
}

// describeCheckpoint returns what a checkpoint says about itself.
func describeCheckpoint(plan *restorePlan) *checkpointInfo {
	m := plan.manifest
	i := &checkpointInfo{Handler: plan.handler, Runtime: m.Runtime, CreatedAt: m.CreatedAt,
		SignedBy: plan.signer.String(), Node: m.Node, NodeAccess: plan.hostAccess()}
	if m.Pod != nil {
		i.Pod = m.Pod.Namespace + "/" + m.Pod.Name
	}
	for _, f := range m.Files {
		i.Size += f.Size
	}
	for n := range m.Containers {
		c := &m.Containers[n]
		one := checkpointContainer{Name: c.Name, Image: cmp.Or(c.Image.Name, c.Image.Ref), ImageID: c.Image.ID}
		for _, f := range m.Files {
			dir, name := path.Split(f.Path)
			dir = path.Clean(dir)
			images := path.Join(m.Dir(c), archive.ImagesDir)
			if m.Pod != nil && dir != m.Dir(c) && dir != images {
				continue
			}
			one.Size += f.Size
			isPages, _ := path.Match("pages-*.img", name)
			if dir == images && (isPages || name == sandboxPages) {
				one.Memory += f.Size
			}
		}
		i.Containers = append(i.Containers, one)
	}
	return i
}

// sandboxPages is gVisor's file with the memory of a sandbox, which includes changed files.
const sandboxPages = "pages.img"

// restoringNode describes a node, as far as a restore depends on it.
type restoringNode struct {
	settings restoreSettings   // of the daemon
	version  criu.Version      // of CRIU
	criu     string            // why CRIU cannot be used; empty: it can be used
	handlers []string          // "": the default
	programs map[string]string // versions of the programs of handlers that do not use berth's own runtime
	images   []string          // IDs
	features []string          // of the processor; nil: unknown
	kernel   string            // release; empty: unknown
}

// restoreNode asks the daemon for the facts on which a restore depends.
func restoreNode(ctx context.Context, c *client.Client, settings restoreSettings) (*restoringNode, error) {
	n := &restoringNode{settings: settings}
	var err error
	n.version, err = criuVersion(ctx, settings.CheckpointCRIU)
	if err != nil {
		n.criu = err.Error()
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return nil, os.NewSyscallError("uname", err)
	}
	n.kernel = unix.ByteSliceToString(uts.Release[:])
	if n.features, err = host.CPUFeatures(); err != nil {
		return nil, err
	}
	if err := n.findHandlers(ctx, c); err != nil {
		return nil, err
	}
	images, err := c.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return nil, client.Explain("list images", err)
	}
	for _, image := range images.GetImages() {
		n.images = append(n.images, image.GetId())
	}
	return n, nil
}

// findHandlers asks the daemon for its handlers and their programs.
func (n *restoringNode) findHandlers(ctx context.Context, c *client.Client) error {
	status, err := c.RuntimeServiceClient.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return client.Explain("status of the runtime", err)
	}
	for _, h := range status.GetRuntimeHandlers() {
		n.handlers = append(n.handlers, h.GetName())
	}
	var described []handler.Info
	if text := status.GetInfo()["handlers"]; text != "" {
		if err := json.Unmarshal([]byte(text), &described); err != nil {
			return fmt.Errorf("read the handlers of the daemon: %w", err)
		}
	}
	n.programs = map[string]string{}
	for _, h := range described {
		if h.Path == "" {
			continue
		}
		n.programs[h.Name] = ""
		if h.Runtime != nil {
			n.programs[h.Name] = h.Runtime.Version
		}
	}
	return nil
}

// criuVersion returns the version of the daemon's CRIU. The error says why CRIU cannot be used.
func criuVersion(ctx context.Context, configured string) (criu.Version, error) {
	program, err := criu.Locate(configured)
	if err != nil {
		return criu.Version{}, err
	}
	version, err := criu.VersionOf(ctx, program)
	if err == nil {
		err = version.Check()
	}
	return version, err
}

// prevents lists what prevents a restore of the plan on this node.
func (n *restoringNode) prevents(plan *restorePlan) []string {
	list := []string{}
	add := func(format string, args ...any) { list = append(list, errdefs.Clip(fmt.Sprintf(format, args...))) }
	m := plan.manifest
	if err := n.settings.permit(plan); err != nil {
		add("%v", err)
	}
	if n.criu != "" && m.Runtime == "" {
		add("%s", n.criu)
	}
	if arch := m.Node.Architecture; arch != "" && arch != runtime.GOARCH {
		add("made on %s, this node is %s", arch, runtime.GOARCH)
	}
	switch version, isProgram := n.programs[plan.handler]; {
	case !slices.Contains(n.handlers, plan.handler):
		add("this node has no runtime handler %q", plan.handler)
	case m.Runtime == "" && isProgram:
		add("the runtime handler %q of this node is not berth's own", plan.handler)
	case m.Runtime != version:
		add("%q made it, and the runtime handler %q of this node has %q", m.Runtime, plan.handler, cmp.Or(version, "berth's own runtime"))
	}
	if m.Runtime != "" && plan.mapped() {
		add("the pod has a user namespace")
	}
	for i := range m.Containers {
		if image := m.Containers[i].Image; !slices.Contains(n.images, image.ID) {
			add("image %s (%s) of container %s is not on this node", cmp.Or(image.Name, image.Ref), shortDigest(image.ID),
				m.Containers[i].Name)
		}
		if err := state.CheckRestorable(plan.containers[i]); err != nil {
			add("%v", err)
		}
	}
	return list
}

// doubts lists what may make a restore fail on this node, compared with the node that wrote the
// checkpoint.
func (n *restoringNode) doubts(from archive.Node) []string {
	list := []string{}
	if from.CRIU > 0 && n.kernel != "" && from.Kernel != n.kernel {
		list = append(list, errdefs.Clip(fmt.Sprintf("this node has Linux %s, and %s wrote it: the kernel must be the same build", n.kernel, from.Kernel)))
	}
	if wrote := versionOf(from); n.criu == "" && n.version.Before(wrote) {
		list = append(list, fmt.Sprintf("CRIU %s is older than %s, which wrote it", n.version, wrote))
	}
	var missing []string
	for _, f := range from.CPUFeatures {
		if !slices.Contains(n.features, f) {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 && n.features != nil && from.Architecture == runtime.GOARCH {
		list = append(list, errdefs.Clip("this node's processor lacks "+strings.Join(missing, " ")))
	}
	return list
}

// versionOf returns the version of a node's CRIU.
func versionOf(n archive.Node) criu.Version {
	return criu.Version{Major: n.CRIU / 10000, Minor: n.CRIU / 100 % 100, Sub: n.CRIU % 100} // 40201 is 4.2.1
}

// shortDigest returns the first digits of a digest.
func shortDigest(digest string) string {
	_, hex, found := strings.Cut(digest, ":")
	if !found || len(hex) < 12 {
		return digest
	}
	return hex[:12]
}

// print writes the description as text. Texts of the checkpoint are quoted, so they cannot control
// a terminal.
func (i *checkpointInfo) print(cmd *cobra.Command) error {
	var out strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&out, "%-12s %s\n", name, errdefs.Clip(fmt.Sprintf(format, args...)))
	}
	line("pod", "%s", cmp.Or(i.Pod, "none: one container"))
	line("handler", "%s", cmp.Or(i.Handler, "the default"))
	for _, c := range i.Containers {
		line("container", "%s: %s (%s), %s, memory %s", c.Name, c.Image, shortDigest(c.ImageID),
			cli.Bytes(uint64(c.Size)), cli.Bytes(uint64(c.Memory)))
	}
	line("saved", "%s", i.CreatedAt.UTC().Format("2006-01-02 15:04:05 MST"))
	line("made by", "berth %s, %s, Linux %s (%s)", i.Node.Berth, cmp.Or(i.Runtime, "CRIU "+versionOf(i.Node).String()), i.Node.Kernel,
		i.Node.Architecture)
	line("size", "%s", cli.Bytes(uint64(i.Size)))
	line("signed by", "%s", i.SignedBy)
	for _, a := range i.NodeAccess {
		line("uses", "%s", a)
	}
	if len(i.Prevents) == 0 {
		line("restore here", "possible, as far as the manifest says")
	}
	for _, p := range i.Prevents {
		line("restore here", "no: %s", p)
	}
	for _, d := range i.Doubts {
		line("restore here", "may fail: %s", d)
	}
	_, err := fmt.Fprint(cmd.OutOrStdout(), out.String())
	return err
}
