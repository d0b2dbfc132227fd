package checkpoint

import (
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// Saved processes of an unusual form are refused by its name before CRIU starts, although this node
// has signed them. Usual ones continue.
func TestRestoreRefusesUnusualMemory(t *testing.T) {
	d := startDaemon(t)
	for kind, cause := range map[string]string{
		"vdso":    "process 1: its vDSO is not that of this kernel",
		"shared":  "not in one private anonymous mapping",
		"private": "",
		"guard":   "",
	} {
		t.Run(kind, func(t *testing.T) {
			pod := d.RunPod(t)
			c := pod.Run(t, runs(t, "unusual", kind), func(c *runtimeapi.ContainerConfig) {
				c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: "GLIBC_TUNABLES", Value: []byte("glibc.pthread.rseq=0")})
			})
			waitCounted(t, c, 1)
			s := save(t, pod, c)
			pod.Remove(t)
			if cause != "" {
				s.startRefused(t, cause)
				return
			}
			restored, list := restorePod(t, d, s.identity(t))
			list[0].Start(t)
			waitCounted(t, list[0], 1)
			restored.Remove(t)
		})
	}
}

// A restored process has a session keyring of its own, not that of the node or of the original.
func TestRestoredKeyring(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, runs(t, "keyring"))
	last := func(c *harness.Container) int {
		harness.EventuallyTrue(t, "it prints", func() bool { return len(outputNumbers(t, c)) > 0 })
		list := outputNumbers(t, c)
		return list[len(list)-1]
	}
	seen := map[int]string{harness.Get(unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false))(t): "this process", last(c): "the original"}
	s := save(t, pod, c)
	pod.Remove(t)
	for _, name := range []string{"a restored process", "another restored process"} {
		restored, list := restorePod(t, d, s.identity(t))
		list[0].Start(t)
		keyring := last(list[0])
		if keyring <= 0 || seen[keyring] != "" {
			t.Errorf("%s has the keyring %d of %s", name, keyring, seen[keyring])
		}
		seen[keyring] = name
		restored.Remove(t)
	}
}
