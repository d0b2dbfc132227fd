package cni

import (
	"log/slog"
	"os"
	"testing"

	"berth/internal/testutil"
)

// The plugin is a shell script that does nothing, so this measures the overhead of berth and
// libcni.
func BenchmarkAddAndDel(b *testing.B) {
	dir := b.TempDir()
	write := func(path, content string) {
		b.Helper()
		testutil.Must(b, os.WriteFile(dir+path, []byte(content), 0o755))
	}
	for _, d := range []string{"/net.d", "/bin"} {
		testutil.Must(b, os.Mkdir(dir+d, 0o755))
	}
	write("/bin/none", "#!/bin/sh\n"+okResult+"\n")
	write("/net.d/1.conflist", conflist("1.0.0", "net", "none"))
	n, err := New(Config{ConfDir: dir + "/net.d", BinDirs: []string{dir + "/bin"}, CacheDir: dir + "/cache", RunDir: dir + "/runs"}, slog.New(slog.DiscardHandler))
	testutil.Must(b, err)
	defer n.Close()
	attachment, err := n.Plan()
	testutil.Must(b, err)
	pod := testPod("p1")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := n.Add(b.Context(), attachment, pod); err != nil {
			b.Fatal(err)
		}
		testutil.Must(b, n.Del(b.Context(), attachment, pod))
	}
}
