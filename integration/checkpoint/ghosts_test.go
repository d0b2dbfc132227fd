package checkpoint

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"berth/integration/harness"
)

// watchDir counts the files that are made in a directory from now on.
func watchDir(t *testing.T, dir string) (made func() int) {
	t.Helper()
	fd := harness.Get(unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK))(t)
	t.Cleanup(func() { harness.Must(t, unix.Close(fd)) })
	harness.Get(unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_MOVED_TO|unix.IN_ATTRIB))(t)
	return func() (n int) {
		buf := make([]byte, 4096)
		for {
			size, err := unix.Read(fd, buf)
			if errors.Is(err, unix.EAGAIN) {
				return n
			}
			harness.Must(t, err)
			for at := 0; at < size; n++ {
				at += unix.SizeofInotifyEvent + int(buf[at+12]) | int(buf[at+13])<<8
			}
		}
	}
}

// A container can put a symbolic link in the place of a directory with a deleted file that is still
// open. CRIU makes that file again, as root. It must not follow the link to the node's files, and
// the restore fails.
func TestRestoreOfDeletedFileBehindALink(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	victim := harness.Get(os.MkdirTemp("/var/lib", "victim-"))(t)
	defer func() { harness.Must(t, os.RemoveAll(victim)) }()
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("mkdir /gone && exec 7>/gone/file && echo x >&7 && rm -r /gone && ln -s "+victim+" /gone && "+counting))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	request := s.identity(t)
	made := watchDir(t, victim)
	response, err := harness.RawRuntime(t, d).RestorePod(t.Context(), request)
	if err == nil {
		d.Objects = append(d.Objects, response.PodSandboxId)
		err = d.Cri.StartContainer(t.Context(), response.RestoredContainers[0].ContainerId)
		restored := &harness.Pod{D: d, Id: response.PodSandboxId, Config: request.Config}
		defer restored.Remove(t)
	}
	if err == nil {
		t.Error("the restore did not fail")
	}
	t.Log(err)
	if n := made(); n > 0 {
		t.Errorf("CRIU has changed the node's files: %d events", n)
	}
}
