package launcher

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzOpenLogFile opens odd paths in a log directory where a container has made a symbolic link.
// Nothing outside may be created or opened.
func FuzzOpenLogFile(f *testing.F) {
	for _, path := range []string{"0.log", "link/0.log", "sub/../0.log", "../0.log", "link", "sub", "/0.log", "sub/\x00", "./sub//0.log"} {
		f.Add(path, "../outside")
	}
	f.Add("link", "/dev/null")
	f.Fuzz(func(t *testing.T, path, link string) {
		root := t.TempDir()
		dir := filepath.Join(root, "logs")
		for _, d := range []string{dir, filepath.Join(dir, "sub"), filepath.Join(root, "outside")} {
			if err := os.Mkdir(d, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if os.Symlink(link, filepath.Join(dir, "link")) != nil {
			t.Skip("the kernel takes no such symlink")
		}
		fd, err := openLogFile(dir, dir+"/"+path)
		for _, d := range []string{root, filepath.Join(root, "outside")} {
			entries, e := os.ReadDir(d)
			if e != nil || d == root && len(entries) != 2 || d != root && len(entries) != 0 {
				t.Fatalf("in %s: %v, %v", d, entries, e)
			}
		}
		if err != nil {
			return
		}
		defer unix.Close(fd)
		place, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
		if err != nil || !strings.HasPrefix(place, dir+"/") || strings.HasPrefix(place, dir+"/link") && place != dir+"/link" {
			t.Fatalf("%q opened %q, %v", path, place, err)
		}
		if info, err := os.Lstat(place); err != nil || !info.Mode().IsRegular() {
			t.Fatalf("%v, %v", info, err)
		}
	})
}
