package lsm

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/oci/confine"
)

// Only requested sources are relabelled, with the container's label and after links are resolved
// (CVE-2021-43816).
func TestLabelMounts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"asked", "other"} {
		testutil.Must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	testutil.Must(t, os.Symlink("asked", dir+"/link"))
	labels := confine.Labels{Process: "own-process", Mount: "own-files"}
	files := map[string]string{}
	var fail error
	host := SELinux{Relabel: func(path, l string) error { files[path] = l; return fail }}
	labelMounts := func(config *runtimeapi.ContainerConfig, labels confine.Labels) error {
		sources, err := MountsToLabel(config, labels)
		for _, source := range sources {
			err = errors.Join(err, host.LabelMount(source, labels))
		}
		return err
	}
	config := &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{
		{HostPath: dir + "/link", ContainerPath: "/a", SelinuxRelabel: true},
		{HostPath: dir + "/other", ContainerPath: "/b"},
		{Image: &runtimeapi.ImageSpec{Image: "x"}, ContainerPath: "/c", SelinuxRelabel: true},
	}}
	testutil.Must(t, labelMounts(config, labels))
	if want := map[string]string{dir + "/asked": "own-files"}; !maps.Equal(files, want) {
		t.Errorf("labelled %v, want %v", files, want)
	}

	for err, want := range map[error]codes.Code{unix.ENOTSUP: codes.OK, unix.EROFS: codes.FailedPrecondition, unix.EPERM: codes.FailedPrecondition, unix.ELOOP: codes.FailedPrecondition,
		errSystemPath: codes.InvalidArgument, unix.EIO: codes.Unknown} {
		t.Run(err.Error(), func(t *testing.T) {
			fail = fmt.Errorf("lsetxattr: %w", err)
			if got := errdefs.Code(labelMounts(config, labels)); got != want {
				t.Errorf("code %v, want %v", got, want)
			}
		})
	}

	clear(files)
	fail = nil
	labels = confine.Labels{} // a host without SELinux
	if err := labelMounts(config, labels); err != nil || len(files) > 0 {
		t.Errorf("without SELinux: labelled %v, %v", files, err)
	}
}
