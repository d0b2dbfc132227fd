package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// newKey returns the key of a new node.
func newKey(t testing.TB) *Key {
	t.Helper()
	key, err := LoadKey(t.TempDir())
	testutil.Must(t, err)
	return key
}

func openDir(t testing.TB, path string) *os.File {
	t.Helper()
	file, err := os.Open(path)
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, file.Close()) })
	return file
}

func put(t testing.TB, path, content string) {
	t.Helper()
	testutil.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	testutil.Must(t, os.WriteFile(path, []byte(content), 0o600))
}

// manifest returns the manifest of a pod with these containers; of one container if pod is false.
func manifest(pod bool, names ...string) *Manifest {
	m := &Manifest{CreatedAt: time.Unix(1700000000, 5).UTC(), Node: Node{Berth: "0.3.0", CRIU: 40201, Kernel: "6.18.0", Architecture: "amd64",
		CPUFeatures: []string{"aes", "sse"}}}
	if pod {
		m.Pod = &Pod{ID: "p1", Name: "web", Namespace: "default", UID: "u1", Handler: "berth", Config: json.RawMessage(`{}`)}
	}
	for _, name := range names {
		m.Containers = append(m.Containers, Container{Name: name, ID: "id-" + name, Config: json.RawMessage(`{}`),
			Image: Image{Name: "r.example/app:v1", Ref: "r.example/app@sha256:" + strings.Repeat("a", 64), ID: "sha256:" + strings.Repeat("b", 64),
				Layers: []Layer{{"sha256:1", "sha256:2"}}}})
	}
	return m
}

// sealed writes an archive into a new directory.
func sealed(t testing.TB, key *Key, pod bool, names ...string) string {
	t.Helper()
	path := t.TempDir()
	dir := openDir(t, path)
	m := manifest(pod, names...)
	if pod {
		put(t, filepath.Join(path, ShmFile), "shm")
	}
	for i := range m.Containers {
		c := &m.Containers[i]
		at := filepath.Join(path, m.Dir(c))
		put(t, filepath.Join(at, ImagesDir, "inventory.img"), "inventory")
		put(t, filepath.Join(at, ImagesDir, "pages-1.img"), strings.Repeat("page", 5000))
		put(t, filepath.Join(at, ImagesDir, DescriptorsFile), `["","",""]`)
		put(t, filepath.Join(at, RootfsDiffFile), "tar")
		testutil.Must(t, WriteContainer(dir, m, Pod{ID: "p1", Name: "web", Namespace: "default"}, c, ContainerFiles{
			Spec: &specs.Spec{Annotations: map[string]string{"a": "b"}}, CreatedAt: time.Unix(1600000000, 0), Status: json.RawMessage(`{}`),
			Labels: map[string]string{"l": "1"}, IP: "10.0.0.1"}))
	}
	testutil.Must(t, Seal(t.Context(), dir, m, key, nil, false))
	return path
}

// imported imports an archive into a new directory. After an error nothing may be left.
func imported(t testing.TB, path string, key *Key) (*Archive, string, error) {
	t.Helper()
	to := t.TempDir()
	dir := openDir(t, to)
	a, err := Import(t.Context(), openDir(t, path), dir, key)
	if err != nil {
		testutil.Must(t, Clear(dir))
		left, err := os.ReadDir(to)
		testutil.Must(t, err)
		if len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
	return a, to, err
}

// packed writes the tar of an archive.
func packed(t testing.TB, dir string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "archive.tar")
	file, err := os.Create(path)
	testutil.Must(t, err)
	testutil.Must(t, Pack(t.Context(), openDir(t, dir), file))
	testutil.Must(t, file.Close())
	return path
}

// tree returns the content of all files below a directory.
func tree(t testing.TB, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	testutil.Must(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		testutil.Must(t, err)
		if info.Mode() != 0o600 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		data, err := os.ReadFile(path)
		name, _ := filepath.Rel(root, path)
		all[name] = string(data)
		return err
	}))
	return all
}

func TestSealAndImport(t *testing.T) {
	t.Parallel()
	key := newKey(t)
	for name, archived := range map[string]string{
		"pod": sealed(t, key, true, "web", "db"), "container": sealed(t, key, false, "web"),
	} {
		for form, from := range map[string]string{"directory": archived, "tar": packed(t, archived)} {
			t.Run(name+" "+form, func(t *testing.T) {
				a, to, err := imported(t, from, key)
				testutil.Must(t, err)
				want, got := tree(t, archived), tree(t, to)
				if a.Signer != ThisNode || len(got) != len(want) || len(a.Manifest.Files) != len(want)-1 {
					t.Errorf("signer %v, %d files, %d in the manifest, of %d", a.Signer, len(got), len(a.Manifest.Files), len(want))
				}
				for path, content := range want {
					if got[path] != content {
						t.Errorf("%s differs", path)
					}
				}
			})
		}
	}
}

// An archive of a sandbox has the images of its runtime, and an archive of CRIU those of CRIU.
func TestImagesOfSandbox(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ runtime, image, missing string }{
		{"runsc version 1", SandboxFile, ""},
		{"runsc version 1", "inventory.img", "web/checkpoint/checkpoint.img"},
		{"", SandboxFile, "web/checkpoint/inventory.img"},
	} {
		m, key, path := manifest(true, "web"), newKey(t), t.TempDir()
		m.Runtime = tc.runtime
		for _, name := range []string{ConfigFile, SpecFile, ImagesDir + "/" + tc.image, ImagesDir + "/pages.img"} {
			put(t, filepath.Join(path, "web", name), "{}")
		}
		err := Seal(t.Context(), openDir(t, path), m, key, nil, false)
		if tc.missing != "" {
			if err == nil || !strings.Contains(err.Error(), tc.missing) {
				t.Errorf("%+v: %v", tc, err)
			}
			continue
		}
		testutil.Must(t, err)
		a, _, err := imported(t, path, key)
		testutil.Must(t, err)
		if a.Manifest.Runtime != tc.runtime {
			t.Errorf("runtime %q", a.Manifest.Runtime)
		}
	}
}

// Nothing is copied of an archive that is not signed with the key: it is another node's, or another
// program's, or this node has no key.
func TestImportNeedsSignature(t *testing.T) {
	t.Parallel()
	key := newKey(t)
	unsigned := sealed(t, key, false, "web")
	testutil.Must(t, os.Remove(filepath.Join(unsigned, ManifestFile)))
	for name, tc := range map[string]struct {
		path string
		key  *Key
	}{
		"another key": {sealed(t, newKey(t), false, "web"), key},
		"no key":      {sealed(t, key, false, "web"), nil},
		"no manifest": {unsigned, key},
	} {
		to := t.TempDir()
		_, err := Import(t.Context(), openDir(t, tc.path), openDir(t, to), tc.key)
		if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "not signed with the key of this node") {
			t.Errorf("%s: %v", name, err)
		}
		if got := tree(t, to); len(got) > 0 {
			t.Errorf("%s: %d files were copied", name, len(got))
		}
	}
}

// edit changes the manifest of an archive and signs it with key.
func edit(t testing.TB, dir string, key *Key, do func(*Manifest)) {
	t.Helper()
	path := filepath.Join(dir, ManifestFile)
	data, err := os.ReadFile(path)
	testutil.Must(t, err)
	var e envelope
	testutil.Must(t, json.Unmarshal(data, &e))
	m := new(Manifest)
	testutil.Must(t, json.Unmarshal(e.Manifest, m))
	do(m)
	data, err = m.encode(key)
	testutil.Must(t, err)
	put(t, path, string(data))
}

// hostile are changes of the archive of a pod with the containers web and db.
var hostile = []struct {
	name, text string
	code       codes.Code
	do         func(t testing.TB, dir string, key *Key)
}{
	{"changed file", "was changed", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		put(t, filepath.Join(dir, "web", ImagesDir, "pages-1.img"), strings.Repeat("pagE", 5000))
	}},
	{"longer file", "bytes instead of", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		put(t, filepath.Join(dir, "web", RootfsDiffFile), "tar and more")
	}},
	{"missing file", "is missing", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		testutil.Must(t, os.Remove(filepath.Join(dir, "db", ImagesDir, "pages-1.img")))
	}},
	{"additional image", "not in the manifest", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		put(t, filepath.Join(dir, "web", ImagesDir, "core-1.img"), "x")
	}},
	{"unknown file", "unexpected file", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		put(t, filepath.Join(dir, "web", "config.toml"), "x")
	}},
	{"hidden file", "unexpected file", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		put(t, filepath.Join(dir, "web", ImagesDir, ".img"), "x")
	}},
	{"third directory", "unexpected directory", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		testutil.Must(t, os.MkdirAll(filepath.Join(dir, "web", ImagesDir, "parent", "x"), 0o700))
	}},
	{"symbolic link", "neither a regular file nor a directory", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		path := filepath.Join(dir, "web", RootfsDiffFile)
		testutil.Must(t, os.Remove(path))
		testutil.Must(t, os.Symlink("/etc/shadow", path))
	}},
	{"linked directory", "neither a regular file nor a directory", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		testutil.Must(t, os.Rename(filepath.Join(dir, "db"), filepath.Join(dir, "..", filepath.Base(dir)+"-db")))
		testutil.Must(t, os.Symlink("web", filepath.Join(dir, "db")))
	}},
	{"hard link", "2 links", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		testutil.Must(t, os.Link(filepath.Join(dir, "web", RootfsDiffFile), filepath.Join(dir, "..", filepath.Base(dir)+"-link")))
	}},
	{"FIFO", "neither a regular file nor a directory", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		testutil.Must(t, unix.Mkfifo(filepath.Join(dir, "web", ImagesDir, "core-1.img"), 0o600))
	}},
	{"sparse giant", "bytes instead of", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		testutil.Must(t, os.Truncate(filepath.Join(dir, "web", ImagesDir, "pages-1.img"), 1<<42))
	}},
	{"signed sparse giant", "no space", codes.FailedPrecondition, func(t testing.TB, dir string, key *Key) {
		testutil.Must(t, os.Truncate(filepath.Join(dir, "web", ImagesDir, "pages-1.img"), 1<<42))
		edit(t, dir, key, func(m *Manifest) {
			i := slices.IndexFunc(m.Files, func(f File) bool { return f.Path == "web/checkpoint/pages-1.img" })
			m.Files[i].Size = 1 << 42
		})
	}},
	{"changed manifest", "wrong signature", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		path := filepath.Join(dir, ManifestFile)
		data, err := os.ReadFile(path)
		testutil.Must(t, err)
		put(t, path, strings.Replace(string(data), `"uid":"u1"`, `"uid":"u2"`, 1))
	}},
	{"no signature", "wrong signature", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		path := filepath.Join(dir, ManifestFile)
		data, err := os.ReadFile(path)
		testutil.Must(t, err)
		var e envelope
		testutil.Must(t, json.Unmarshal(data, &e))
		e.HMAC = ""
		data, err = json.Marshal(e)
		testutil.Must(t, err)
		put(t, path, string(data))
	}},
	{"newer version", "has version 2", codes.FailedPrecondition, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) { m.Version = 2 })
	}},
	{"path outside", "unexpected file", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) { m.Files[0].Path = "../../etc/passwd" })
	}},
	{"file twice in the manifest", "twice", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) { m.Files = append(m.Files, m.Files[0]) })
	}},
	{"files in disorder", "is not in the manifest", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) { slices.Reverse(m.Files) })
	}},
	{"container twice", "two containers", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) { m.Containers = append(m.Containers, m.Containers[0]) })
	}},
	{"container with a path as its name", "cannot be the name", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) { m.Containers[0].Name = "../x" })
	}},
	{"container without images", "inventory.img\" is missing", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) {
			m.Files = slices.DeleteFunc(m.Files, func(f File) bool { return strings.HasSuffix(f.Path, "inventory.img") })
		})
	}},
	{"directory without container", "unexpected file", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) { m.Containers = m.Containers[:1] })
	}},
	{"unknown field", "unknown field", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		put(t, filepath.Join(dir, ManifestFile), `{"manifest":{},"key":"","hmac":"","more":1}`)
	}},
	{"deep manifest", "nested deeper", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		put(t, filepath.Join(dir, ManifestFile), `{"manifest":`+strings.Repeat("[", 100_000))
	}},
	{"manifest of many containers", "more than 524288 values", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		put(t, filepath.Join(dir, ManifestFile), `{"manifest":{"containers":[`+strings.Repeat("null,", maxValues)+`null]}}`)
	}},
	{"large manifest", "has more than", codes.InvalidArgument, func(t testing.TB, dir string, _ *Key) {
		path := filepath.Join(dir, ManifestFile)
		testutil.Must(t, os.Truncate(path, maxManifest+1))
	}},
	{"linked manifest", "", codes.Unknown, func(t testing.TB, dir string, _ *Key) {
		path := filepath.Join(dir, ManifestFile)
		testutil.Must(t, os.Rename(path, filepath.Join(dir, PodDumpFile)))
		testutil.Must(t, os.Symlink(PodDumpFile, path))
	}},
	{"two containers in a sandbox", "2 containers in the images of a sandbox", codes.InvalidArgument, func(t testing.TB, dir string, key *Key) {
		edit(t, dir, key, func(m *Manifest) { m.Runtime = "runsc version 1" })
	}},
}

// TestHostileDirectories changes one property of an archive at a time. Import must refuse it.
func TestHostileDirectories(t *testing.T) {
	t.Parallel()
	for _, tc := range hostile {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			key := newKey(t)
			dir := sealed(t, key, true, "web", "db")
			tc.do(t, dir, key)
			a, _, err := imported(t, dir, key)
			if err == nil || a != nil || !strings.Contains(err.Error(), tc.text) || errdefs.Code(err) != tc.code {
				t.Errorf("%v: %v; want %v with %q", errdefs.Code(err), err, tc.code, tc.text)
			}
		})
	}
}

// TestHostileTars imports tars that Pack would not write.
func TestHostileTars(t *testing.T) {
	t.Parallel()
	key := newKey(t)
	good, err := os.ReadFile(packed(t, sealed(t, key, true, "web")))
	testutil.Must(t, err)
	for _, tc := range []struct {
		name, text string
		headers    []tar.Header // after the good entries
	}{
		{"path outside", "unexpected file", []tar.Header{{Name: "../x", Typeflag: tar.TypeReg}}},
		{"absolute path", "unexpected file", []tar.Header{{Name: "/etc/passwd", Typeflag: tar.TypeReg}}},
		{"file twice", "twice", []tar.Header{{Name: "web/config.dump", Typeflag: tar.TypeReg}}},
		{"file twice by another name", "twice", []tar.Header{{Name: "./web/config.dump", Typeflag: tar.TypeReg}}},
		{"unclean path", "unexpected file", []tar.Header{{Name: "web/./config.dump", Typeflag: tar.TypeReg}}},
		{"second manifest", "twice", []tar.Header{{Name: ManifestFile, Typeflag: tar.TypeReg}}},
		{"symbolic link", "neither a regular file nor a directory", []tar.Header{{Name: "web/status", Typeflag: tar.TypeSymlink, Linkname: "/etc"}}},
		{"hard link", "neither a regular file nor a directory", []tar.Header{{Name: "web/status", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}}},
		{"device", "neither a regular file nor a directory", []tar.Header{{Name: "web/status", Typeflag: tar.TypeBlock, Devmajor: 8}}},
		{"additional file", "not in the manifest", []tar.Header{{Name: "web/checkpoint/core-1.img", Typeflag: tar.TypeReg}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "hostile.tar")
			var more bytes.Buffer
			w := tar.NewWriter(&more)
			for _, h := range tc.headers {
				testutil.Must(t, w.WriteHeader(&h))
			}
			testutil.Must(t, w.Close())
			const end = 1024 // two empty blocks end a tar
			put(t, path, string(good[:len(good)-end])+more.String())
			if a, _, err := imported(t, path, key); err == nil || a != nil || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("%v; want %q", err, tc.text)
			}
		})
	}
	t.Run("truncated", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "hostile.tar")
		for _, n := range []int{0, 100, 600, len(good) / 2, len(good) - 3000} {
			put(t, path, string(good[:n]))
			if _, _, err := imported(t, path, key); err == nil {
				t.Errorf("imported %d of %d bytes", n, len(good))
			}
		}
	})
	t.Run("sparse", func(t *testing.T) {
		t.Parallel()
		h := tar.Header{Name: "status", Typeflag: tar.TypeReg, PAXRecords: map[string]string{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}}
		if err := checkHeader(&h); err == nil {
			t.Error("a sparse file is accepted")
		}
	})
}

// paxHeader returns an extended header with arbitrary records, which tar.Writer would refuse, and
// the entry to which it belongs.
func paxHeader(t testing.TB, records string) string {
	t.Helper()
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	testutil.Must(t, w.WriteHeader(&tar.Header{Name: "x", Typeflag: tar.TypeReg, Size: int64(len(records))}))
	_, err := w.Write([]byte(records))
	testutil.Must(t, err)
	testutil.Must(t, w.Flush())
	header := data.Bytes()
	header[156] = tar.TypeXHeader
	copy(header[148:156], "        ")
	sum := 0
	for _, b := range header[:512] {
		sum += int(b)
	}
	copy(header[148:], fmt.Sprintf("%06o\x00 ", sum))
	testutil.Must(t, w.WriteHeader(&tar.Header{Name: "web/status", Typeflag: tar.TypeReg}))
	testutil.Must(t, w.Close())
	return data.String()
}

// TestHostileHeaders imports tars whose headers are broken, or exceed the limits.
func TestHostileHeaders(t *testing.T) {
	t.Parallel()
	const end = 1024 // two empty blocks end a tar
	key := newKey(t)
	good, err := os.ReadFile(packed(t, sealed(t, key, true, "web")))
	testutil.Must(t, err)
	var directories bytes.Buffer
	w := tar.NewWriter(&directories)
	for range maxEntries + 1 {
		testutil.Must(t, w.WriteHeader(&tar.Header{Name: "web/", Typeflag: tar.TypeDir}))
	}
	for _, tc := range []struct{ name, text, more string }{
		{"NUL in a name", "invalid tar header", paxHeader(t, "14 path=web\x00x\n")},
		{"name longer than a path", "unexpected file", paxHeader(t, "50010 path="+strings.Repeat("x", 50_010-12)+"\n")},
		{"huge header", "header field too long", paxHeader(t, strings.Repeat("12 a=bcdefg\n", 1<<17))},
		{"negative size", "invalid tar header", paxHeader(t, "11 size=-1\n")},
		{"size of 8 EiB", "Seek: invalid offset", paxHeader(t, "28 size=9223372036854775807\n")},
		{"sparse file", "is sparse", paxHeader(t, "22 GNU.sparse.major=0\n22 GNU.sparse.minor=1\n26 GNU.sparse.numblocks=1\n22 GNU.sparse.map=0,0\n")},
		{"more entries than an archive has", "more than 65536 files", directories.String()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "hostile.tar")
			put(t, path, string(good[:len(good)-end])+tc.more)
			if a, _, err := imported(t, path, key); err == nil || a != nil || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("%v; want %q", err, tc.text)
			}
		})
	}
}

// TestFileLimit reads archives with as many files as the limits allow, and with one more.
func TestFileLimit(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		most int
		read func(t *testing.T, n int) error
	}{
		{"manifest", maxFiles, checkFiles},
		{"directory", maxEntries, walkEntries},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			testutil.Must(t, tc.read(t, tc.most))
			isOverFileLimit(t, tc.read(t, tc.most+1))
		})
	}
	t.Run("tar", func(t *testing.T) {
		t.Parallel()
		read, err := readEntries(t, maxEntries+1)
		isOverFileLimit(t, err)
		if read != maxEntries {
			t.Errorf("read %d entries, want %d", read, maxEntries)
		}
	})
}

func isOverFileLimit(t *testing.T, err error) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), "more than 65536 files") {
		t.Errorf("one more: %v", err)
	}
}

func imageName(i int) string { return fmt.Sprintf("checkpoint/core-%d.img", i) }

// checkFiles checks a manifest that names n files.
func checkFiles(t *testing.T, n int) error {
	t.Helper()
	m := manifest(false, "web")
	paths := []string{ConfigFile, SpecFile, ImagesDir + "/inventory.img", ImagesDir + "/" + DescriptorsFile}
	for i := range n - len(paths) {
		paths = append(paths, imageName(i))
	}
	for _, path := range paths {
		m.Files = append(m.Files, File{Path: path, SHA256: strings.Repeat("0", 64)})
	}
	return m.check()
}

// readEntries reads a tar of n files, and returns how many it has read.
func readEntries(t *testing.T, n int) (read int, err error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "archive.tar")
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	for range n {
		testutil.Must(t, w.WriteHeader(&tar.Header{Name: "status.dump", Typeflag: tar.TypeReg}))
	}
	testutil.Must(t, w.Close())
	put(t, path, data.String())
	err = tarFile{openDir(t, path), int64(data.Len())}.entries(func(*tar.Header, io.Reader) error { read++; return nil })
	return read, err
}

// walkEntries reads the last two of n entries of a directory.
func walkEntries(t *testing.T, n int) error {
	t.Helper()
	path := t.TempDir()
	put(t, filepath.Join(path, "one"), "")
	put(t, filepath.Join(path, "two"), "")
	dir, err := safefs.OpenDir(openDir(t, path), "")
	testutil.Must(t, err)
	defer dir.Close()
	w := walk{entries: n - 2, do: func(entry) error { return nil }}
	return w.dir(dir, "", 1)
}

// TestManifestMemory decodes manifests with as many small values as the limits allow. They must not
// take much memory: the daemon decodes them.
func TestManifestMemory(t *testing.T) {
	const most = 256 << 20
	for name, body := range map[string]string{
		"containers": `"containers":[` + strings.Repeat("null,", maxValues-10) + "null]",
		"objects":    `"containers":[` + strings.Repeat("{},", maxValues/2-10) + "{}]",
		"files":      `"files":[` + strings.Repeat("null,", maxValues-10) + "null]",
		"features":   `"node":{"cpuFeatures":[` + strings.Repeat(`"",`, maxValues-10) + `""]}`,
		"one text":   `"node":{"kernel":"` + strings.Repeat("x", maxManifest-1000) + `"}`,
	} {
		t.Run(name, func(t *testing.T) {
			data := []byte(`{"manifest":{"version":1,` + body + `},"key":"","hmac":""}`)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, _, err := decodeManifest(data, nil)
			runtime.ReadMemStats(&after)
			if allocated := after.TotalAlloc - before.TotalAlloc; err == nil || allocated > most {
				t.Errorf("%d MiB were allocated: %v", allocated>>20, err)
			} else {
				t.Logf("%d MiB for %d MiB", allocated>>20, len(data)>>20)
			}
		})
	}
}

// TestReadJSON checks the limits of a container's JSON files.
func TestReadJSON(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	dir := openDir(t, path)
	var config struct{ Name string }
	if err := ReadJSON(dir, SpecFile, &config); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	put(t, filepath.Join(path, SpecFile), `{"name":"a","more":[1,{"b":2}]}`)
	if err := ReadJSON(dir, SpecFile, &config); err != nil || config.Name != "a" {
		t.Errorf("%+v, %v", config, err)
	}
	for name, tc := range map[string]struct{ content, text string }{
		"no JSON":     {"x", "invalid character"},
		"large":       {strings.Repeat(" ", 16<<20+1), "large"},
		"deep":        {strings.Repeat("[", 1000), "nested deeper"},
		"many values": {`{"args":[` + strings.Repeat("1,", maxValues) + "1]}", "more than"},
		"other type":  {`{"name":1}`, "cannot unmarshal"},
	} {
		put(t, filepath.Join(path, SpecFile), tc.content)
		if err := ReadJSON(dir, SpecFile, &config); errdefs.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), tc.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
	put(t, filepath.Join(path, SpecFile), `{"process":{"args":[`+strings.Repeat(`"",`, maxValues)+`""]}}`)
	if err := ReadJSON(dir, SpecFile, new(specs.Spec)); err == nil || !strings.Contains(err.Error(), "more than 524288 values") {
		t.Errorf("many arguments: %v", err)
	}
}

// TestImportEndsWithContext checks that a large archive is not copied to its end.
func TestImportEndsWithContext(t *testing.T) {
	t.Parallel()
	key := newKey(t)
	from, to := openDir(t, sealed(t, key, true, "web")), openDir(t, t.TempDir())
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the client is gone")
	cancel(gone)
	if _, err := Import(ctx, from, to, key); !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
}

// TestSealRefusesForeignFiles checks that a writer cannot leave other files in an archive.
func TestSealRefusesForeignFiles(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	put(t, filepath.Join(path, "web", "core"), "x")
	if err := Seal(t.Context(), openDir(t, path), manifest(true, "web"), newKey(t), nil, false); err == nil || !strings.Contains(err.Error(), "unexpected file") {
		t.Errorf("%v", err)
	}
}

// TestSpecHasAnnotations checks what checkpointctl and CRI-O read.
func TestSpecHasAnnotations(t *testing.T) {
	t.Parallel()
	dir := sealed(t, newKey(t), false, "web")
	var spec specs.Spec
	var config struct {
		RootfsImageRef string `json:"rootfsImageRef"`
		Name           string `json:"name"`
	}
	for name, into := range map[string]any{SpecFile: &spec, ConfigFile: &config} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		testutil.Must(t, err)
		testutil.Must(t, json.Unmarshal(data, into))
	}
	if config.RootfsImageRef != strings.Repeat("b", 64) || config.Name != "web" {
		t.Errorf("%+v", config)
	}
	for name, want := range map[string]string{"io.kubernetes.cri-o.Metadata": `{"attempt":0,"name":"web"}`, "io.kubernetes.cri-o.Annotations": `{}`,
		"io.kubernetes.cri-o.Labels": `{"l":"1"}`, "io.kubernetes.pod.name": "web", "io.kubernetes.cri-o.IP.0": "10.0.0.1", "a": "b"} {
		if got := spec.Annotations[name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

func TestLoadKey(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if _, err := ReadKey(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ReadKey: %v", err)
	}
	first, err := LoadKey(root)
	testutil.Must(t, err)
	second, err := LoadKey(root)
	testutil.Must(t, err)
	if *first != *second || first.ID() == newKey(t).ID() {
		t.Error("the key is not the same, or that of another node is")
	}
	path := filepath.Join(root, keyFile)
	info, err := os.Stat(path)
	testutil.Must(t, err)
	if info.Mode() != 0o600 || info.Size() != keySize {
		t.Errorf("%v, %d bytes", info.Mode(), info.Size())
	}
	for name, change := range map[string]func() error{
		"mode":  func() error { return os.Chmod(path, 0o640) },
		"owner": func() error { return errors.Join(os.Chmod(path, 0o600), os.Chown(path, 1, 0)) },
	} {
		testutil.Must(t, change())
		if _, err := ReadKey(root); errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "with mode 0600") {
			t.Errorf("another %s: %v", name, err)
		}
	}
	testutil.Must(t, errors.Join(os.Chown(path, 0, 0), os.Chmod(path, 0o600)))
	for _, damaged := range []string{"", strings.Repeat("x", keySize-1), strings.Repeat("x", keySize+1)} {
		put(t, path, damaged)
		if _, err := LoadKey(root); errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "Delete it") {
			t.Errorf("%d bytes: %v", len(damaged), err)
		}
		if data, err := os.ReadFile(path); err != nil || string(data) != damaged {
			t.Errorf("the damaged key was replaced: %v", err)
		}
	}
}

func TestCheckName(t *testing.T) {
	t.Parallel()
	for name, valid := range map[string]bool{"web": true, "a.b_c-1": true, "": false, ".": false, "..": false, ".x": false, "a/b": false,
		ManifestFile: false, PodDumpFile: false, ShmFile: false, strings.Repeat("x", maxName+1): false, "a b": false, "ä": false} {
		if err := CheckName(name); (err == nil) != valid {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// FuzzManifest checks that a manifest without the node's signature is never this node's, and that
// an accepted one has no path outside.
func FuzzManifest(f *testing.F) {
	key := newKey(f)
	data, err := os.ReadFile(filepath.Join(sealed(f, newKey(f), true, "web"), ManifestFile))
	testutil.Must(f, err)
	f.Add(data)
	f.Add([]byte(`{"manifest":{"version":1},"key":"` + key.ID() + `","hmac":"00"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, signer, err := decodeManifest(data, key)
		if err != nil {
			return
		}
		if signer == ThisNode {
			t.Fatal("accepted a signature of this node")
		}
		for _, file := range m.Files {
			if !filepath.IsLocal(file.Path) {
				t.Fatalf("accepted %q", file.Path)
			}
		}
	})
}

// FuzzTar checks that no tar writes a file outside its directory, and that an error leaves nothing.
func FuzzTar(f *testing.F) {
	key := newKey(f)
	data, err := os.ReadFile(packed(f, sealed(f, key, false, "web")))
	testutil.Must(f, err)
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "fuzz.tar")
		put(t, path, string(data))
		parent := t.TempDir()
		to := filepath.Join(parent, "to")
		testutil.Must(t, os.Mkdir(to, 0o700))
		dir := openDir(t, to)
		if _, err := Import(t.Context(), openDir(t, path), dir, key); err == nil {
			return
		}
		testutil.Must(t, Clear(dir))
		if left, err := filepath.Glob(filepath.Join(parent, "*", "*")); err != nil || len(left) > 0 {
			t.Fatalf("left %v: %v", left, err)
		}
	})
}
