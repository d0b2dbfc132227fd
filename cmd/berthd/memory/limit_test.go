package memory

import (
	"os"
	"path/filepath"
	"testing"
)

func TestOwnLimit(t *testing.T) {
	for name, tt := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"v2, limited": {map[string]string{
			"proc/self/cgroup":                                    "0::/system.slice/berth.service\n",
			"sys/fs/cgroup/system.slice/memory.max":               "max\n",
			"sys/fs/cgroup/system.slice/berth.service/memory.max": "67108864\n",
		}, 64 << 20},
		"v2, limited above": {map[string]string{
			"proc/self/cgroup":                                    "0::/system.slice/berth.service\n",
			"sys/fs/cgroup/system.slice/memory.max":               "33554432\n",
			"sys/fs/cgroup/system.slice/berth.service/memory.max": "67108864\n",
		}, 32 << 20},
		"v2, not limited":          {map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 0},
		"v2, no memory controller": {map[string]string{"proc/self/cgroup": "0::/a\n"}, 0},
		"v1, limited": {map[string]string{
			"proc/self/cgroup":                   "4:memory:/a\n1:cpu:/\n0::/\n",
			"sys/fs/cgroup/memory/a/memory.stat": "cache 0\nhierarchical_memory_limit 67108864\ntotal_cache 0\n",
		}, 64 << 20},
		"v1, not limited": {map[string]string{
			"proc/self/cgroup":                 "4:memory:/\n0::/\n",
			"sys/fs/cgroup/memory/memory.stat": "hierarchical_memory_limit 9223372036854771712\n",
		}, 0},
		"v1, in another namespace": {map[string]string{"proc/self/cgroup": "4:memory:/../x\n"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, content := range tt.files {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(root, file)), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(root, file), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := OwnLimit(root)
			if err != nil || got != tt.want {
				t.Errorf("%d, %v, want %d", got, err, tt.want)
			}
		})
	}
	if _, err := OwnLimit("/"); err != nil {
		t.Errorf("this machine: %v", err)
	}
}
