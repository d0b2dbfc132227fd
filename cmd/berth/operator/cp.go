package operator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/copytree"
	"berth/internal/safefs"
)

func cpCommand(o *Connection) *cobra.Command {
	var archive, follow bool
	cmd := &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files from or to a running container",
		Long: `Copy a file or directory from a running container (NAME:PATH) to the host, or from the
host to the container. The container needs no tar program, but it must run, and the
command must run on the node.

The copy gets the source's name if the destination is a directory, else the
destination's name. SOURCE/. copies only the content of a directory. Copies belong to
root, in a container to its root user. Symlinks are copied unchanged. Devices, FIFOs
and sockets are skipped. Nothing outside of the container's file system is read or
written, even if the container's processes replace files by symlinks meanwhile.`,
		Example: "  berth cp web/app:/var/log ./logs\n  berth cp ./index.html web/app:/srv/",
		Args:    cli.Args(2, 2, "name a source and a destination"),
	}
	containerName := o.addContainerFlag(cmd)
	cmd.Flags().BoolVarP(&archive, "archive", "a", false,
		"keep owners, as IDs in the container; in the container also setuid bits")
	cmd.Flags().BoolVarP(&follow, "follow-link", "L", false, "copy the target if SOURCE is a symlink")
	cmd.ValidArgsFunction = o.completeNames(containerPaths)
	cmd.RunE = o.Connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		from, to := parsePlace(args[0]), parsePlace(args[1])
		if (from.container == "") == (to.container == "") {
			return errors.New("one of SOURCE and DESTINATION must be NAME:PATH; a path of the host with a colon starts with ./")
		}
		if from.path == "" || to.path == "" || args[0] == "-" || args[1] == "-" {
			return errors.New("name a path on both sides; for a tar stream use: berth exec -i NAME tar …")
		}
		ctx := cmd.Context()
		container, err := findRunning(ctx, c, from.container+to.container, *containerName)
		if err != nil {
			return err
		}
		p, err := openProcess(ctx, c, container)
		if err != nil {
			return err
		}
		defer p.close()
		copying := copying{process: p, archive: archive, options: copytree.Options{Follow: follow,
			Warn: func(format string, args ...any) { cmd.PrintErrf("berth: "+format+"\n", args...) }}}
		if from.container != "" {
			err = copying.toHost(ctx, from.path, to.path)
		} else {
			err = copying.toContainer(ctx, from.path, to.path)
		}
		if err != nil {
			err = fmt.Errorf("copy %s to %s: %w", args[0], args[1], err)
		}
		return err
	})
	return cmd
}

// place is an argument of cp: a path in a container, or of the host if container is empty.
type place struct{ container, path string }

// parsePlace splits NAME:PATH. As in docker, an argument that starts with / or . is a path of the
// host.
func parsePlace(arg string) place {
	name, path, ok := strings.Cut(arg, ":")
	if !ok || name == "" || strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, ".") {
		return place{path: arg}
	}
	return place{name, path}
}

// containerPaths lists the running containers as beginnings of paths, such as "web/nginx:/".
func containerPaths(ctx context.Context, c *client.Client) ([]string, error) {
	list, err := c.Containers(ctx)
	var names []string
	for _, container := range list {
		if container.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			names = append(names, client.ContainerName(container)+":/")
		}
	}
	return names, err
}

// copying is a copy from or to the files of a process.
type copying struct {
	process *process
	archive bool
	options copytree.Options
}

// roots opens the container's root and the host's. The container's root is the root of its mount
// namespace, with all its mounts.
func (c *copying) roots() (container, host *os.File, users, groups idMap, err error) {
	dir := fmt.Sprintf("/proc/%d/", c.process.pid)
	if container, err = safefs.OpenRoot(dir + "root"); err != nil {
		return nil, nil, nil, nil, err
	}
	users, userErr := readIDMap(dir + "uid_map")
	groups, groupErr := readIDMap(dir + "gid_map")
	host, hostErr := safefs.OpenRoot("/")
	// Only if the process still exists do the opened files belong to it.
	if err := errors.Join(userErr, groupErr, hostErr, c.process.alive()); err != nil {
		return nil, nil, nil, nil, errors.Join(err, container.Close())
	}
	return container, host, users, groups, nil
}

// toHost copies from the container. Set-ID bits are removed, because the copy belongs to the host's
// root.
func (c *copying) toHost(ctx context.Context, from, to string) error {
	container, host, users, groups, err := c.roots()
	if err != nil {
		return err
	}
	defer container.Close()
	defer host.Close()
	target, err := hostPath(to)
	if err != nil {
		return err
	}
	o := c.options
	o.Owner = func(uint32, uint32) (uint32, uint32) { return uint32(os.Geteuid()), uint32(os.Getegid()) }
	if c.archive {
		o.Owner = func(uid, gid uint32) (uint32, uint32) { return users.inside(uid), groups.inside(gid) }
	}
	return copytree.Copy(ctx, copytree.Place{Root: container, Path: from}, copytree.Place{Root: host, Path: target}, o)
}

// toContainer copies to the container.
func (c *copying) toContainer(ctx context.Context, from, to string) error {
	container, host, users, groups, err := c.roots()
	if err != nil {
		return err
	}
	defer container.Close()
	defer host.Close()
	source, err := hostPath(from)
	if err != nil {
		return err
	}
	o := c.options
	o.SetID = c.archive
	rootUser, rootGroup := users.outside(0), groups.outside(0)
	o.Owner = func(uint32, uint32) (uint32, uint32) { return rootUser, rootGroup }
	if c.archive {
		o.Owner = func(uid, gid uint32) (uint32, uint32) { return users.outside(uid), groups.outside(gid) }
	}
	return asOwner(rootUser, rootGroup, func() error {
		return copytree.Copy(ctx, copytree.Place{Root: host, Path: source}, copytree.Place{Root: container, Path: to}, o)
	})
}

// hostPath makes a path of the host absolute. It keeps a trailing slash or "/.", which have a
// meaning for Copy.
func hostPath(path string) (string, error) {
	absolute, err := filepath.Abs(path)
	if strings.HasSuffix(path, "/") {
		absolute += "/"
	}
	if filepath.Base(path) == "." || strings.HasSuffix(path, "/.") {
		absolute += "/."
	}
	return absolute, err
}

// asOwner calls do with the file system IDs of a container's root user. In a user namespace the
// kernel refuses to create files for IDs without a mapping, such as the host's root (EOVERFLOW).
// The thread keeps its capabilities (SECBIT_NO_SETUID_FIXUP) and ends with the call.
func asOwner(uid, gid uint32, do func() error) error {
	if uid == 0 && gid == 0 {
		return do()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		if err := unix.Prctl(unix.PR_SET_SECUREBITS, noSetuidFixup, 0, 0, 0); err != nil {
			done <- fmt.Errorf("keep capabilities: %w", err)
			return
		}
		if err := errors.Join(unix.Setfsgid(int(gid)), unix.Setfsuid(int(uid))); err != nil {
			done <- fmt.Errorf("take the container's user IDs: %w", err)
			return
		}
		done <- do()
	}()
	return <-done
}

const noSetuidFixup = 1 << 2 // SECBIT_NO_SETUID_FIXUP

// idMap maps the IDs of a user namespace to the host's.
type idMap []idRange

type idRange struct{ inside, outside, size uint32 }

// unmapped is the ID that the kernel reports for IDs without a mapping.
const unmapped = 65534

func readIDMap(path string) (idMap, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var m idMap
	for line := range strings.Lines(string(text)) {
		var r idRange
		if _, err := fmt.Sscan(line, &r.inside, &r.outside, &r.size); err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		m = append(m, r)
	}
	return m, nil
}

// outside returns the host's ID of an ID in the namespace.
func (m idMap) outside(id uint32) uint32 {
	for _, r := range m {
		if id >= r.inside && id-r.inside < r.size {
			return r.outside + (id - r.inside)
		}
	}
	if id != unmapped {
		return m.outside(unmapped)
	}
	return unmapped
}

// inside returns the namespace's ID of an ID of the host.
func (m idMap) inside(id uint32) uint32 {
	for _, r := range m {
		if id >= r.outside && id-r.outside < r.size {
			return r.inside + (id - r.outside)
		}
	}
	return unmapped
}
