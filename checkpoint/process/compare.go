package process

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/checkpoint/process/archive"
	"berth/internal/errdefs"
	"berth/internal/safefs"
)

// Request is a container that shall continue a checkpoint.
type Request struct {
	Dir     string // the container's directory in the checkpoint
	Entry   string // name of that directory in the archive
	Name    string // of the container, for error texts
	ImageID string
	Spec    *specs.Spec
}

// Compare returns FailedPrecondition with the differences if a checkpoint does not fit the
// requested container.
func Compare(a *archive.Archive, r Request) error {
	var dumped specs.Spec
	if err := ReadJSON(r.Dir, archive.SpecFile, &dumped); err != nil {
		return err
	}
	differences := append(processDifferences(dumped.Process, r.Spec.Process), rightsDifferences(&dumped, r.Spec)...)
	if a.Manifest.Runtime != "" {
		differences = append(differences, sandboxMountDifferences(dumped.Mounts, r.Spec.Mounts)...)
	} else {
		differences = append(differences, mountDifferences(&dumped, r.Spec)...)
	}
	differences = append(differences, mappingDifferences(&dumped, r.Spec)...)
	if image := imageOf(a, r.Entry); image != r.ImageID {
		differences = append([]string{fmt.Sprintf("image: the checkpoint has %s, the request %s", image, r.ImageID)}, differences...)
	}
	if len(differences) > 0 {
		return errdefs.FailedPrecondition("the checkpoint of %s is not that of the requested container: %s",
			r.Name, errdefs.Clip(strings.Join(differences, "; ")))
	}
	if a.Manifest.Runtime != "" { // the runtime compares devices and limits
		return nil
	}
	return checkStreams(r.Dir)
}

// ReadJSON decodes a file of a container's directory in a checkpoint.
func ReadJSON(dir, name string, into any) error {
	root, err := safefs.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer root.Close() // it was only read
	return archive.ReadJSON(root, name, into)
}

// imageOf returns the ID of the image of a container in a checkpoint. name is the name of the
// container's directory.
func imageOf(a *archive.Archive, name string) string {
	for i := range a.Manifest.Containers {
		if c := &a.Manifest.Containers[i]; a.Manifest.Dir(c) == name {
			return c.Image.ID
		}
	}
	return ""
}

// ownVariables are the environment variables that berth derives from the pod's identity.
var ownVariables = []string{"HOSTNAME"}

// processDifferences compares the checkpointed process with the requested one.
func processDifferences(have, want *specs.Process) (differences []string) {
	if have == nil || want == nil {
		return nil // rightsDifferences says so
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

// rightsDifferences compares the rights of a saved container with those of the request. CRIU and
// gVisor restore the saved rights. LSM labels are not compared, because CRIU sets the labels of the
// request.
func rightsDifferences(have, want *specs.Spec) (differences []string) {
	if have.Process == nil || have.Linux == nil {
		return []string{"the checkpoint describes no process"}
	}
	if have.Process.NoNewPrivileges != want.Process.NoNewPrivileges {
		differences = append(differences, fmt.Sprintf("no_new_privs: the checkpoint has %t, the request %t",
			have.Process.NoNewPrivileges, want.Process.NoNewPrivileges))
	}
	for _, right := range []struct {
		name       string
		have, want any
	}{
		{"capabilities", have.Process.Capabilities, want.Process.Capabilities},
		{"seccomp profile", have.Linux.Seccomp, want.Linux.Seccomp},
	} {
		x, haveErr := json.Marshal(right.have)
		y, wantErr := json.Marshal(right.want)
		if haveErr != nil || wantErr != nil || !bytes.Equal(x, y) {
			differences = append(differences, right.name+": the checkpoint has another than the request")
		}
	}
	return differences
}

// mappingDifferences compares the user namespaces. In the writable layer and /dev/shm, owners are
// the host IDs of the saved pod, and berth does not change them.
func mappingDifferences(have, want *specs.Spec) []string {
	mappings := func(spec *specs.Spec) string {
		if spec.Linux == nil || len(spec.Linux.UIDMappings) == 0 {
			return "none"
		}
		return fmt.Sprintf("users %v, groups %v", spec.Linux.UIDMappings, spec.Linux.GIDMappings)
	}
	if x, y := mappings(have), mappings(want); x != y {
		return []string{fmt.Sprintf("user namespace: the checkpoint has %s, the request %s", x, y)}
	}
	return nil
}

// sandboxMountDifferences compares the mounts of a saved sandbox with those of the request. The
// saved mounts are in the sandbox's images, which berth can neither read nor change.
func sandboxMountDifferences(have, want []specs.Mount) (differences []string) {
	x, y := mountOptions(have), mountOptions(want)
	for _, place := range slices.Sorted(maps.Keys(x)) {
		if y[place] != x[place] {
			differences = append(differences, fmt.Sprintf("mount at %s: the checkpoint has another than the request", place))
		}
		delete(y, place)
	}
	for _, place := range slices.Sorted(maps.Keys(y)) {
		differences = append(differences, fmt.Sprintf("mount at %s: the checkpoint has none", place))
	}
	return differences
}

// mountOptions returns the types and options of mounts by mount point. Sources differ between pods.
func mountOptions(mounts []specs.Mount) map[string]string {
	options := map[string]string{}
	for _, m := range mounts {
		options[m.Destination] = fmt.Sprint(m.Type, " ", slices.Sorted(slices.Values(m.Options)))
	}
	return options
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

// checkStreams refuses a list of streams with which the container would get descriptors of CRIU in
// addition to the three streams.
func checkStreams(dir string) error {
	var streams []string
	if err := ReadJSON(dir, path.Join(archive.ImagesDir, archive.DescriptorsFile), &streams); err != nil {
		return err
	}
	if len(streams) != 3 {
		return errdefs.InvalidArgument("%s of the checkpoint has %d streams", archive.DescriptorsFile, len(streams))
	}
	return nil
}
