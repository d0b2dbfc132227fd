package runtime

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/checkpoint/archive"
	"berth/checkpoint/confined"
	"berth/checkpoint/verify"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/netns"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// Unpacker unpacks a tar into a directory, in a confined process. *process.Program implements it.
type Unpacker interface {
	Unpack(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error)
}

// Restores prepares what pods and containers get from a checkpoint. Nothing in a checkpoint names a
// file outside berth's own directories, or an image to use.
type Restores struct {
	Dirs     state.Dirs
	Key      func() (*archive.Key, error) // of this node
	Foreign  bool                         // checkpoints that this node has not signed are allowed
	Verifier string                       // path of berth-verify; empty: there is none
	Unpacker Unpacker
	Launcher Inspector
}

// Inspector tells what a container would get from a launcher. *shim.Launchers implements it.
type Inspector interface {
	Inspect(ctx context.Context, profile *specs.LinuxSeccomp) (*proto.Inspected, error)
}

// Import copies the checkpoint at path to the directory of the pod with that ID and checks it. The
// caller removes Dirs.Writable of the pod after an error. The original is not needed afterwards.
//
// Errors: InvalidArgument for a malformed checkpoint. FailedPrecondition for one of another node,
// unless those are allowed, or of another architecture.
func (k Restores) Import(ctx context.Context, path, podID string) (*archive.Archive, error) {
	key, err := k.Key()
	if err != nil {
		return nil, err
	}
	from, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, errdefs.InvalidArgument("open checkpoint: %w", err)
	}
	defer from.Close() // it was only read
	dir := k.Dirs.Checkpoint(podID)
	failpoint.Reach("restore.make-directory")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory for a checkpoint: %w", err)
	}
	failpoint.Reach("restore.directory-made")
	to, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open directory for a checkpoint: %w", err)
	}
	defer to.Close() // its files are synced or worthless
	failpoint.Reach("restore.import")
	a, err := archive.Import(ctx, from, to, key)
	if err != nil {
		return nil, fmt.Errorf("import checkpoint %s: %w", path, err)
	}
	failpoint.Reach("restore.imported")
	if a.Signer != archive.ThisNode && !k.Foreign {
		return nil, errdefs.FailedPrecondition(
			"checkpoint %s is not signed by this node (signer: %s); checkpoint.restore_foreign allows such checkpoints", path, a.Signer)
	}
	if arch := a.Manifest.Node.Architecture; arch != "" && arch != goruntime.GOARCH {
		return nil, errdefs.FailedPrecondition("checkpoint %s was made on %s, this node is %s", path, arch, goruntime.GOARCH)
	}
	return a, nil
}

// maxCheckpointJSON limits a JSON file of a checkpoint, in bytes.
const maxCheckpointJSON = 16 << 20

// readJSON decodes a file of a checkpoint.
func readJSON(dir, name string, into any) error {
	root, err := safefs.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer root.Close() // it was only read
	data, err := safefs.ReadFile(root, name, maxCheckpointJSON)
	if err != nil {
		return fmt.Errorf("read %s of a checkpoint: %w", name, err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return errdefs.InvalidArgument("%s of the checkpoint: %w", name, err)
	}
	return nil
}

// Compare returns FailedPrecondition with the difference if the checkpoint of a container is not that
// of a container with this image and spec.
func (k Restores) Compare(ctx context.Context, a *archive.Archive, c *state.Container, spec *specs.Spec) error {
	dir := k.Dirs.CheckpointOf(c.PodID, c.Restore)
	var dumped specs.Spec
	if err := readJSON(dir, archive.SpecFile, &dumped); err != nil {
		return err
	}
	image, err := imageOf(a, c.Restore.Name, dir)
	if err != nil {
		return err
	}
	differences := processDifferences(dumped.Process, spec.Process)
	if image != c.Image.ID {
		differences = append([]string{fmt.Sprintf("image: the checkpoint has %s, the request %s", image, c.Image.ID)}, differences...)
	}
	if len(differences) > 0 {
		return errdefs.FailedPrecondition("the checkpoint of %s is not that of the requested container: %s",
			c.Config.GetMetadata().GetName(), errdefs.Clip(strings.Join(differences, "; ")))
	}
	if err := checkStreams(dir); err != nil {
		return err
	}
	if a.Signer == archive.ThisNode {
		return nil
	}
	return k.verify(ctx, dir, c, spec)
}

// imageOf returns the ID of the image of a container in a checkpoint.
func imageOf(a *archive.Archive, name, dir string) (string, error) {
	for i := range a.Manifest.Containers {
		if c := &a.Manifest.Containers[i]; a.Manifest.Dir(c) == name && c.Image.ID != "" {
			return c.Image.ID, nil
		}
	}
	var config struct {
		Ref string `json:"rootfsImageRef"`
	}
	if err := readJSON(dir, archive.ConfigFile, &config); err != nil {
		return "", err
	}
	id := digest.Digest(config.Ref)
	if !strings.Contains(config.Ref, ":") {
		id = digest.NewDigestFromEncoded(digest.SHA256, config.Ref)
	}
	if id.Validate() != nil {
		return "", errdefs.FailedPrecondition("the checkpoint names no image ID")
	}
	return id.String(), nil
}

// ownVariables are the environment variables that berth derives from the pod's identity.
var ownVariables = []string{"HOSTNAME"}

// processDifferences compares the checkpointed process with the requested one.
func processDifferences(have, want *specs.Process) (differences []string) {
	if have == nil || want == nil {
		return []string{"the checkpoint describes no process"}
	}
	differ := func(field string, have, want any) {
		differences = append(differences, fmt.Sprintf("%s: the checkpoint has %q, the request %q", field, have, want))
	}
	if !slices.Equal(have.Args, want.Args) {
		differ("command", have.Args, want.Args)
	}
	if have.Cwd != want.Cwd {
		differ("working directory", have.Cwd, want.Cwd)
	}
	a, b := environment(have.Env), environment(want.Env)
	for _, name := range slices.Sorted(maps.Keys(a)) {
		if value, ok := b[name]; !ok || value != a[name] {
			differences = append(differences, fmt.Sprintf("environment variable %s differs", name)) // it may be a secret
		}
		delete(b, name)
	}
	for _, name := range slices.Sorted(maps.Keys(b)) {
		differences = append(differences, fmt.Sprintf("environment variable %s is not in the checkpoint", name))
	}
	if have.User.UID != want.User.UID || have.User.GID != want.User.GID {
		differ("user", fmt.Sprintf("%d:%d", have.User.UID, have.User.GID), fmt.Sprintf("%d:%d", want.User.UID, want.User.GID))
	}
	if x, y := sorted(have.User.AdditionalGids), sorted(want.User.AdditionalGids); !slices.Equal(x, y) {
		differ("supplementary groups", fmt.Sprint(x), fmt.Sprint(y))
	}
	if have.Terminal != want.Terminal {
		differ("terminal", fmt.Sprint(have.Terminal), fmt.Sprint(want.Terminal))
	}
	return differences
}

func environment(list []string) map[string]string {
	variables := map[string]string{}
	for _, v := range list {
		name, value, _ := strings.Cut(v, "=")
		if !slices.Contains(ownVariables, name) {
			variables[name] = value
		}
	}
	return variables
}

func sorted(ids []uint32) []uint32 {
	ids = slices.Clone(ids)
	slices.Sort(ids)
	return slices.Compact(ids)
}

// NullStream names the null device of a container's streams in a checkpoint.
const NullStream = "pipe:[berth-null]"

// checkStreams refuses a list of streams that would give the container other descriptors of CRIU than
// the three streams.
func checkStreams(dir string) error {
	var streams []string
	if err := readJSON(dir, path.Join(archive.ImagesDir, archive.DescriptorsFile), &streams); err != nil {
		return err
	}
	if len(streams) != 3 {
		return errdefs.InvalidArgument("%s of the checkpoint has %d streams", archive.DescriptorsFile, len(streams))
	}
	return nil
}

// verify compares CRIU's images with the spec, in the confined program berth-verify.
func (k Restores) verify(ctx context.Context, dir string, c *state.Container, spec *specs.Spec) error {
	if k.Verifier == "" {
		return errdefs.FailedPrecondition("the program berth-verify, which is needed for checkpoints of other nodes, was not found")
	}
	images, err := os.Open(filepath.Join(dir, archive.ImagesDir))
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer images.Close() // it was only read
	launcher, err := k.Launcher.Inspect(ctx, spec.Linux.Seccomp)
	if err != nil {
		return err
	}
	permitted, err := expectations(spec, launcher)
	if err != nil {
		return err
	}
	var report *verify.Report
	for _, expected := range permitted {
		if report, err = confined.Verify(ctx, k.Verifier, images, expected); err != nil {
			return fmt.Errorf("verify the checkpoint of %s: %w", c.Config.GetMetadata().GetName(), err)
		}
		if len(report.Differences) == 0 {
			return nil
		}
	}
	text := make([]string, len(report.Differences))
	for i, d := range report.Differences {
		text[i] = d.String()
	}
	return errdefs.FailedPrecondition("the checkpoint of %s exceeds what the request permits: %s",
		c.Config.GetMetadata().GetName(), errdefs.Clip(strings.Join(text, "; ")))
}

// expectations returns what a container of this spec may have at most: one for each filter that a
// launcher could load for its seccomp profile.
func expectations(spec *specs.Spec, launcher *proto.Inspected) (all []verify.Expected, err error) {
	if len(launcher.Seccomp) == 0 { // there is no profile, or it allows everything
		spec = withoutSeccomp(spec)
	}
	expected := verify.Expected{
		Spec: spec, Rlimits: launcher.Rlimits, ExternalFiles: []string{NullStream},
		AbsentPaths: verify.AbsentPaths(spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths),
		Memory:      memoryLimit(spec),
	}
	if expected.CgroupOptions, err = verify.CgroupOptions(); err != nil {
		return nil, fmt.Errorf("find options of the cgroup filesystem: %w", err)
	}
	if expected.Cgroups, err = verify.NodeCgroups(); err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err)
	}
	if expected.UnprivilegedPort, err = unprivilegedPort(spec); err != nil {
		return nil, fmt.Errorf("find ports without privileges: %w", err)
	}
	if len(launcher.Seccomp) == 0 {
		return []verify.Expected{expected}, nil
	}
	for _, filter := range launcher.Seccomp {
		expected.Seccomp = filter
		all = append(all, expected)
	}
	return all, nil
}

// unprivilegedPort returns the first port that a process without capabilities can bind in the
// container's network namespace.
func unprivilegedPort(spec *specs.Spec) (port uint32, err error) {
	read := func() error {
		data, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
		if err != nil {
			return err
		}
		n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32)
		port = uint32(n)
		return err
	}
	for _, ns := range spec.Linux.Namespaces {
		if ns.Type == specs.NetworkNamespace {
			err = netns.In(ns.Path, read)
			return port, err
		}
	}
	err = read()
	return port, err
}

// withoutSeccomp returns a copy of the spec without seccomp profile.
func withoutSeccomp(spec *specs.Spec) *specs.Spec {
	changed, linux := *spec, *spec.Linux
	linux.Seccomp = nil
	changed.Linux = &linux
	return &changed
}

// memoryLimit returns the memory limit of a container in bytes, or 0.
func memoryLimit(spec *specs.Spec) int64 {
	if r := spec.Linux.Resources; r != nil && r.Memory != nil && r.Memory.Limit != nil && *r.Memory.Limit > 0 {
		return *r.Memory.Limit
	}
	return 0
}

// FillLayer writes the files of a container's checkpoint into its empty writable layer.
func (k Restores) FillLayer(ctx context.Context, c *state.Container, root rootfs.Spec) error {
	dir := k.Dirs.CheckpointOf(c.PodID, c.Restore)
	hidden, err := whiteouts(dir)
	if err != nil {
		return err
	}
	upper, err := os.Open(root.Upper)
	if err != nil {
		return fmt.Errorf("open writable layer of %s: %w", c.ID, err)
	}
	defer upper.Close() // a layer outlives no crash
	result, err := k.unpack(ctx, upper, hidden, filepath.Join(dir, archive.RootfsDiffFile))
	if err != nil {
		return fmt.Errorf("fill writable layer of %s: %w", c.ID, err)
	}
	if len(result.Links) > 0 || result.Opaque {
		return errdefs.FailedPrecondition("%s of the checkpoint depends on the image in a way that cannot be restored",
			archive.RootfsDiffFile)
	}
	if err := unpack.MarkOpaque(upper, result.Opaques); err != nil {
		return fmt.Errorf("fill writable layer of %s: %w", c.ID, err)
	}
	return nil
}

// FillShm writes the checkpointed content of /dev/shm into that of the pod. name is the directory of
// a container that has it; "." for the pod's own.
func (k Restores) FillShm(ctx context.Context, podID, name string) error {
	shm, err := os.Open(k.Dirs.Shm(podID))
	if err != nil {
		return fmt.Errorf("open /dev/shm of pod %s: %w", podID, err)
	}
	defer shm.Close() // a tmpfs
	content := filepath.Join(k.Dirs.Checkpoint(podID), name, archive.ShmFile)
	if _, err := k.unpack(ctx, shm, new(whiteoutReader), content); err != nil {
		return fmt.Errorf("fill /dev/shm of pod %s: %w", podID, err)
	}
	return nil
}

// unpack unpacks a tar of a checkpoint into an empty directory, after the whiteouts. A missing tar is
// empty.
func (k Restores) unpack(
	ctx context.Context, tree *os.File, hidden *whiteoutReader, path string,
) (unpack.Result, error) {
	var rest io.Reader = bytes.NewReader(make([]byte, 1024)) // the end of an archive
	file, err := os.Open(path)
	switch {
	case err == nil:
		defer file.Close() // it was only read
		rest = file
	case !errors.Is(err, fs.ErrNotExist):
		return unpack.Result{}, err
	case len(hidden.names) == 0:
		return unpack.Result{}, nil
	}
	failpoint.Reach("restore.unpack")
	result, err := k.Unpacker.Unpack(ctx, tree, io.MultiReader(hidden, rest), unpack.Job{Algorithm: digest.SHA256})
	failpoint.Reach("restore.unpacked")
	return result, err
}

// Names of whiteouts in the tar of a layer (image-spec, layer.md).
const (
	whiteout       = ".wh."
	opaqueWhiteout = ".wh..wh..opq"
)

// maxDeleted limits the deleted files of a checkpoint.
const maxDeleted = 1 << 20

// whiteouts returns the deleted files of a checkpoint as entries of a tar without its end. A deleted
// file of the name .wh..wh..opq hides all files of the image in its directory.
func whiteouts(dir string) (*whiteoutReader, error) {
	r := &whiteoutReader{}
	r.tar = tar.NewWriter(&r.buffer)
	err := readJSON(dir, archive.DeletedFilesFile, &r.names)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if len(r.names) > maxDeleted {
		return nil, errdefs.InvalidArgument("%s of the checkpoint has more than %d files", archive.DeletedFilesFile, maxDeleted)
	}
	for i, file := range r.names {
		parent, base := safefs.Split(safefs.Clean(file))
		if base == "" {
			return nil, errdefs.InvalidArgument("%s of the checkpoint has the root directory", archive.DeletedFilesFile)
		}
		if base != opaqueWhiteout {
			base = whiteout + base
		}
		r.names[i] = safefs.Join(parent, base)
	}
	return r, nil
}

// whiteoutReader makes the entries of whiteouts while it is read.
type whiteoutReader struct {
	names  []string // of entries that have not been made
	buffer bytes.Buffer
	tar    *tar.Writer
}

func (r *whiteoutReader) Read(p []byte) (int, error) {
	for r.buffer.Len() == 0 {
		if len(r.names) == 0 {
			return 0, io.EOF
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: r.names[0], Mode: 0o600}
		r.names = r.names[1:]
		if err := r.tar.WriteHeader(header); err != nil {
			return 0, errdefs.InvalidArgument("%s of the checkpoint: %w", archive.DeletedFilesFile, err)
		}
	}
	return r.buffer.Read(p)
}
