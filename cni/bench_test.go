package cni

import (
	"log/slog"
	"os"
	"testing"
)

// The plugin is a shell script that does nothing, so this measures the overhead of berth and
// libcni.
func BenchmarkAddAndDel(b *testing.B) {
	dir := b.TempDir()
	write := func(path, content string) {
		b.Helper()
		if err := os.WriteFile(dir+path, []byte(content), 0o755); err != nil {
			b.Fatal(err)
		}
	}
	for _, d := range []string{"/net.d", "/bin"} {
		if err := os.Mkdir(dir+d, 0o755); err != nil {
			b.Fatal(err)
		}
	}
	write("/bin/none", "#!/bin/sh\n"+okResult+"\n")
	write("/net.d/1.conflist", conflist("1.0.0", "net", "none"))
	n, err := New(Config{ConfDir: dir + "/net.d", BinDirs: []string{dir + "/bin"}, CacheDir: dir + "/cache", RunDir: dir + "/runs"}, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	defer n.Close()
	attachment, err := n.Plan()
	if err != nil {
		b.Fatal(err)
	}
	pod := testPod("p1")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := n.Add(b.Context(), attachment, pod); err != nil {
			b.Fatal(err)
		}
		if err := n.Del(b.Context(), attachment, pod); err != nil {
			b.Fatal(err)
		}
	}
}
