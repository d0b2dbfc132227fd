package layer

import (
	"archive/tar"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/internal/testutil"
)

// packagesEnv names a directory with packages of a distribution (fetch_corpus of contrib/lib.sh).
const packagesEnv = "BERTH_CORPUS"

// Both drivers show the same files for images made of a distribution's packages, with layers on top
// that hide, replace and link files. fsck.erofs accepts the EROFS image.
func TestDriversAgreeOnPackages(t *testing.T) {
	packages, err := filepath.Glob(filepath.Join(os.Getenv(packagesEnv), "*.deb"))
	testutil.Must(t, err)
	if os.Getenv(packagesEnv) == "" || len(packages) == 0 {
		t.Skipf("NOT TESTED: %s names no directory with packages, contrib/test fetches some", packagesEnv)
	}
	w := newTwin(t)
	var chain []digest.Digest
	var names []string
	for _, p := range packages {
		data, err := exec.Command("dpkg-deb", "--fsys-tarfile", p).Output()
		testutil.Must(t, err)
		id := w.create(t, data)
		if id == "" {
			t.Fatalf("%s is no layer", p)
		}
		chain = append(chain, id)
		names = append(names, tarNames(t, data)...)
	}
	t.Logf("%d packages, %d names", len(packages), len(names))
	w.compare(t, chain...)
	w.fsck(t)
	chain = append(chain, w.create(t, makeTar(t, changes(names)...)), w.create(t, makeTar(t, extremes()...)))
	w.compare(t, chain...)
	w.fsck(t)
}

// tarNames are the files in a tar that are not directories.
func tarNames(t *testing.T, data []byte) (names []string) {
	t.Helper()
	for r := tar.NewReader(strings.NewReader(string(data))); ; {
		h, err := r.Next()
		if err != nil {
			return names
		}
		if h.Typeflag == tar.TypeReg {
			names = append(names, strings.TrimPrefix(h.Name, "./"))
		}
	}
}

// changes returns the entries of a layer that hides, replaces or links some of the files and
// directories below.
func changes(names []string) (list []header) {
	for i, name := range names {
		dir, base := filepath.Split(name)
		switch i % 97 {
		case 0:
			list = append(list, file(dir+".wh."+base, ""))
		case 1:
			list = append(list, file(name, "another").owned(i, 7).xattr("user.number", fmt.Sprint(i)))
		case 2:
			list = append(list, hardlink(fmt.Sprint("linked/", i), name))
		case 3:
			list = append(list, symlink(name, "/"+name))
		case 4:
			list = append(list, mode(file(dir+"new", "new"), 0o4711))
		}
	}
	dirs := slices.Compact(slices.Sorted(func(yield func(string) bool) {
		for _, name := range names {
			if strings.Count(name, "/") == 4 && !yield(filepath.Dir(name)) {
				return
			}
		}
	}))
	for i, dir := range dirs {
		switch i % 31 {
		case 0:
			list = append(list, file(dir+"/.wh..wh..opq", ""))
		case 1:
			list = append(list, file(filepath.Dir(dir)+"/.wh."+filepath.Base(dir), ""))
		}
	}
	return list
}

// extremes are unusual files that few packages contain.
func extremes() (list []header) {
	deep := "deep"
	for len(deep) < 3000 {
		deep += "/" + strings.Repeat("d", 200)
	}
	list = append(list, file(deep+"/f", "deep"), symlink(deep+"/l", strings.Repeat("../", 1300)),
		file("large", strings.Repeat("0123456789abcdef", 4<<20)), file("zeros", strings.Repeat("\x00", 1<<20)),
		file(strings.Repeat("ü", 127), "unicode"), file("日本語/ファイル", "unicode"), file("not\xffutf\xfe", "bytes"), file(" \n\t\\", "blanks"),
		device(tar.TypeChar, "dev/null", 1, 3), device(tar.TypeBlock, "dev/disk", 259, 0xfffff), device(tar.TypeFifo, "dev/fifo", 0, 0),
		mode(file("setuid", "x").owned(1<<31, 1<<32-2), 0o6755).xattr("security.capability", string(capability())), dir("sticky", 0o1777),
		file("attributes", "").xattr("user.large", strings.Repeat("x", 3000)).xattr("user.empty", "").xattr("user.bin\xff", "\x00\xff"))
	for i := range 5000 {
		list = append(list, file(fmt.Sprintf("many/%d/%s-%d", i%3, strings.Repeat("n", i%200), i), strings.Repeat("x", i%9000)))
	}
	return list
}

// fsck has erofs-utils read all EROFS images that there are.
func (w twin) fsck(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("fsck.erofs"); err != nil {
		t.Log("NOT TESTED: what fsck.erofs says of the image: ", err)
		return
	}
	for _, j := range w.erofs.joins.All() {
		l := w.erofs.imageOf(j)
		args := []string{"--extract"}
		for _, d := range l.Data {
			args = append(args, "--device="+d)
		}
		out, err := exec.Command("fsck.erofs", append(args, l.Path)...).CombinedOutput()
		if strings.Contains(string(out), "unrecognized option") { // before erofs-utils 1.5 it reads the metadata only
			out, err = exec.Command("fsck.erofs", l.Path).CombinedOutput()
		}
		if err != nil {
			t.Errorf("fsck.erofs: %v\n%s", err, out)
		}
	}
}
