package checkpoint

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
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
