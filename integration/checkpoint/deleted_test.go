package checkpoint

import (
	"os"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/integration/harness"
)

// A container can hold a deleted file open and replace its directory by a symbolic link to a
// directory of the node. CRIU creates the deleted file again as root. It must not follow the link,
// although this node has signed the checkpoint.
func TestDeletedFileBehindLink(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	const prepare = `mkdir /d && echo x >/d/x && exec 3<>/d/x && rm -r /d && ln -s `
	for name, tc := range map[string]struct{ target, cause string }{
		"link to the node":      {"/etc", "the deleted file \"/d/x\" cannot be restored: /d has a symbolic link"},
		"link in the container": {"../../tmp", "the deleted file \"/d/x\" cannot be restored: /d has a symbolic link"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Script(prepare+tc.target+" /d && "+counting))
			waitCounted(t, c, 1)
			s := save(t, pod, c)
			pod.Remove(t)
			before := len(harness.Get(os.ReadDir("/etc"))(t))
			restored, containers := restorePod(t, d, s.identity(t))
			err := d.Cri.StartContainer(t.Context(), containers[0].Id)
			harness.WantCode(t, err, codes.FailedPrecondition, tc.cause)
			harness.Equal(t, "files in /etc", len(harness.Get(os.ReadDir("/etc"))(t)), before)
			restored.Remove(t)
		})
	}
}
