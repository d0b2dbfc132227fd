package process

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/image/unpack/worker"
	"berth/internal/errdefs"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// built is the path of the real berth-unpack, built without ISA-L.
var built string

// builds are berth-unpacks by their names.
var builds = map[string]*struct {
	loads  string // looked for instead of libisal.so.2
	stub   string // body of isal_inflate in a stub library that is built and loaded instead
	gunzip string // what reads gzip; empty: the process dies of it
	path   string // of the program; empty where ISA-L's headers are missing
}{
	"go":                        {gunzip: "Go"},
	"isal":                      {gunzip: "ISA-L"},
	"isal without the library":  {gunzip: "Go", loads: "libnone.so.2"},
	"isal with another library": {gunzip: "Go", loads: "libc.so.6"},
	"isal that refuses":         {gunzip: "Go", stub: "return -1"},
	"isal that crashes":         {stub: "__builtin_trap()"},
}

// eachBuild runs a test with three builds of berth-unpack. The remaining ones fall back to Go like
// the third.
func eachBuild(t *testing.T, stall time.Duration, test func(*testing.T, *Program)) {
	for _, name := range []string{"go", "isal", "isal without the library"} {
		t.Run(name, func(t *testing.T) { test(t, open(t, need(t, name), stall)) })
	}
}

// need returns the path of a build, and skips the test if there is none.
func need(t *testing.T, name string) string {
	t.Helper()
	if builds[name].path == "" {
		t.Skip("libisal-dev is not installed")
	}
	return builds[name].path
}

func TestMain(m *testing.M) {
	if os.Args[0] == "berth-unpack" { // see liar
		if slices.Contains(os.Args, spinning) {
			spin()
		}
		said, err := io.ReadAll(io.LimitReader(os.Stdin, 16<<20)) // to the end of the blob, if it has one
		if err == nil {
			_, err = os.Stdout.Write(said)
		}
		if err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	testutil.MainNeedsRoot()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "berth-unpack-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	defer removeStubs()
	if err := buildAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// buildAll builds those of builds that this host can build, in dir.
func buildAll(dir string) error {
	headers := exec.Command("cc", "-E", "-include", "isa-l/igzip_lib.h", "/dev/null").Run() == nil
	for name, b := range builds {
		env, tags := "CGO_ENABLED=1", "isal"
		switch {
		case name == "go":
			env, tags = "CGO_ENABLED=0", ""
		case !headers:
			continue
		}
		var err error
		if b.path, err = build(dir, name, env, tags); err != nil {
			return err
		}
		if b.stub != "" {
			if b.loads, err = buildStub(b.stub); err != nil {
				return err
			}
		}
		if b.loads != "" {
			if err := loadInstead(b.path, b.loads); err != nil {
				return err
			}
		}
	}
	built = builds["go"].path
	return nil
}

// buildStub builds a library with ISA-L's functions and the given inflate function, and returns its
// path, which is no longer than the name of ISA-L's.
func buildStub(inflate string) (path string, err error) {
	for n := range 1000 {
		path = fmt.Sprintf("/tmp/%03d.so", n)
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o700)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		stubs = append(stubs, path)
		if err := f.Close(); err != nil {
			return "", err
		}
		source := "void isal_inflate_init() {} void isal_gzip_header_init() {} int isal_read_gzip_header() { return 0; } int isal_inflate_set_dict() { return 0; } int isal_inflate() { " + inflate + "; }"
		cc := exec.Command("cc", "-w", "-shared", "-fPIC", "-x", "c", "-o", path, "-")
		cc.Stdin = strings.NewReader(source)
		if out, err := cc.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build %s: %w\n%s", path, err, out)
		}
		return path, nil
	}
	return "", errors.New("no name is left for a library")
}

var stubs []string // by their paths

func removeStubs() {
	for _, path := range stubs {
		if err := os.Remove(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}

// loadInstead has a program look for another library than ISA-L, whose name may not be longer.
func loadInstead(path, library string) error {
	program, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	const name = "libisal.so.2\x00"
	if n := bytes.Count(program, []byte(name)); n != 1 {
		return fmt.Errorf("%s names libisal.so.2 %d times", path, n)
	}
	other := append([]byte(library), make([]byte, len(name)-len(library))...)
	return os.WriteFile(path, bytes.Replace(program, []byte(name), other, 1), 0o755)
}

// build builds berth-unpack and returns its path.
func build(dir, name, env, tags string) (string, error) {
	path := filepath.Join(dir, "berth-unpack "+name)
	cmd := exec.Command("go", "build", "-tags", tags, "-o", path, "berth/cmd/berth-unpack")
	cmd.Env = append(os.Environ(), env)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build berth-unpack (%s): %w\n%s", name, err, out)
	}
	return path, nil
}

func open(t testing.TB, path string, stall time.Duration) *Program {
	t.Helper()
	p, err := Open(path, stall, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// spinning is the entry limit with which a test tells liar to spin.
const spinning = "7777777"

// spin uses up its CPU time limit of one second.
func spin() {
	if err := unix.Setrlimit(unix.RLIMIT_CPU, &unix.Rlimit{Cur: 1, Max: 1}); err != nil {
		os.Exit(1)
	}
	for { //nolint:staticcheck // the test needs a busy process
	}
}

// A layer that exceeds the CPU time that any layer can need fails with FailedPrecondition: a retry
// would not help.
func TestCPULimit(t *testing.T) {
	p := liar(t)
	p.most = func(unpack.Limits) time.Duration { return time.Second }
	endless := job
	endless.Limits.Entries = 7777777
	_, err := p.Unpack(t.Context(), tree(t), zeros{}, endless)
	if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "CPU time limit of 1s") {
		t.Errorf("%v: %v", errdefs.Code(err), err)
	}
}

// liar is a program that answers with the bytes of its blob.
func liar(t *testing.T) *Program { return open(t, "/proc/self/exe", time.Minute) }

func tree(t testing.TB) *os.File {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	root, err := safefs.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

var job = unpack.Job{Algorithm: digest.SHA256}

type entry struct {
	tar.Header
	content string
}

func file(name, content string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}, content}
}

func special(typ byte, name, link string) entry {
	return entry{Header: tar.Header{Typeflag: typ, Name: name, Linkname: link, Mode: 0o755, ModTime: time.Unix(1e9, 0)}}
}

func (e entry) with(change func(*tar.Header)) entry { change(&e.Header); return e }

func pack(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// everyKind has at least one entry for each thing that unpacking does.
func everyKind(t testing.TB) []byte {
	xattr := func(name, value string) func(*tar.Header) {
		return func(h *tar.Header) {
			h.PAXRecords = map[string]string{unpack.XattrRecord + name: value}
		}
	}
	owned := func(h *tar.Header) { h.Uid, h.Gid, h.Mode = 1000, 65535, 0o6755 }
	null := func(h *tar.Header) { h.Devmajor, h.Devminor = 1, 3 }
	capability := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	acl := "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x02\x00\x04\x00\xe8\x03\x00\x00\x04\x00\x04\x00\xff\xff\xff\xff\x10\x00\x04\x00\xff\xff\xff\xff\x20\x00\x04\x00\xff\xff\xff\xff"
	entries := []entry{
		special(tar.TypeDir, "d/", "").with(func(h *tar.Header) { h.Mode = 0o700; h.Uid = 7 }),
		file("d/f", strings.Repeat("content ", 100_000)).with(owned),
		special(tar.TypeDir, "closed/", "").with(func(h *tar.Header) { h.Mode = 0; h.Uid = 1000 }),
		file("closed/f", "x"),
		file("implied/f", "x"),
		special(tar.TypeSymlink, "s", "/d").with(owned),
		file("s/through", "x"),
		special(tar.TypeLink, "h", "d/f"),
		special(tar.TypeLink, "implied/h", "d/f"),
		special(tar.TypeLink, "elsewhere", "lower/file"),
		special(tar.TypeChar, "null", "").with(null).with(owned),
		special(tar.TypeBlock, "block", "").with(null),
		special(tar.TypeFifo, "fifo", "").with(owned),
		file("cap", "x").with(xattr("security.capability", capability)),
		file("acl", "x").with(xattr("system.posix_acl_access", acl)),
		file("attr", "x").with(xattr("user.a", "b")),
		special(tar.TypeDir, "dattr/", "").with(xattr("user.a", "b")),
		special(tar.TypeFifo, "nodeattr", "").with(xattr("user.a", "b")),
		file("hidden", "x").with(xattr("trusted.overlay.redirect", "/etc")),
		file("replaced/a/b", "x"), special(tar.TypeSymlink, "replaced", "d"), file("replaced/new", "x"),
		file(".wh.gone", ""), file("d/.wh..wh..opq", ""), file("opaque/.wh..wh..opq", ""),
		file(strings.Repeat("deep/", 500)+"f", "x"),
		file("n\xff\nl", "x"),
	}
	for i := range 300 {
		entries = append(entries, file(fmt.Sprintf("many/%d/%d", i%40, i), strconv.Itoa(i)))
	}
	return pack(t, entries...)
}

func gzipped(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write(data)
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zstandard(t testing.TB, data []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(data, nil)
}

// describe describes the relevant properties of each file in a tree.
func describe(t *testing.T, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	inodes := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		if inodes[st.Ino] == "" {
			inodes[st.Ino] = path[len(root):]
		}
		text := fmt.Sprintf("%o %d:%d %x %d of %s %d.%d", st.Mode, st.Uid, st.Gid, st.Rdev, st.Nlink, inodes[st.Ino], st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += digest.FromBytes(data).String()
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			text += target
		}
		names := make([]byte, 4096)
		n, err := unix.Llistxattr(path, names)
		if err != nil {
			return err
		}
		for _, name := range slices.Sorted(strings.SplitSeq(strings.TrimRight(string(names[:n]), "\x00"), "\x00")) {
			value := make([]byte, 4096)
			n, _ := unix.Lgetxattr(path, name, value)
			text += fmt.Sprintf(" %s=%q", name, value[:max(n, 0)])
		}
		if unpack.IsWhiteout(&st) {
			text = "whiteout" // a whiteout's time is the time of unpacking
		}
		all[path[len(root):]] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// ISA-L is loaded, before the process is confined, if it exists; no other library is used in its
// place. An unsupported or crashing library affects gzip only. The daemon logs the decompressor in
// use.
func TestGunzip(t *testing.T) {
	data := pack(t, file("f", "content"))
	blob := gzipped(t, data)
	for name, b := range builds {
		t.Run(name, func(t *testing.T) {
			p := open(t, need(t, name), time.Minute)
			var log bytes.Buffer
			p.log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			if _, err := p.Unpack(t.Context(), tree(t), bytes.NewReader(zstandard(t, data)), job); err != nil {
				t.Fatalf("a zstd blob: %v", err)
			}
			log.Reset()
			_, err := p.Unpack(t.Context(), tree(t), bytes.NewReader(blob), job)
			if (err != nil) != (b.gunzip == "") {
				t.Fatal(err)
			}
			if err == nil && !strings.Contains(log.String(), "gunzip="+b.gunzip+"\n") {
				t.Errorf("want gunzip=%s: %s", b.gunzip, &log)
			}
		})
	}
}

// A node without ISA-L can run the program: it is not linked with the library.
func TestLinkedLibraries(t *testing.T) {
	program, err := elf.Open(need(t, "isal"))
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	libraries, err := program.ImportedLibraries()
	if err != nil || len(libraries) == 0 || slices.ContainsFunc(libraries, func(l string) bool { return strings.HasPrefix(l, "libisal") }) {
		t.Errorf("linked with %q, %v", libraries, err)
	}
}

// The process gives the same result as package unpack, for every type of entry and every
// compression.
func TestEveryKind(t *testing.T) { eachBuild(t, time.Minute, testEveryKind) }

func testEveryKind(t *testing.T, p *Program) {
	data := everyKind(t)
	want := tree(t)
	result, err := unpack.Layer(t.Context(), want, bytes.NewReader(data), job)
	if err != nil {
		t.Fatal(err)
	}
	if len(result.Opaques) == 0 || len(result.Links) == 0 || len(result.Implied) == 0 || result.Whiteouts == 0 || result.Unsupported == 0 {
		t.Errorf("the library says %+v", result)
	}
	for name, blob := range map[string][]byte{"plain": data, "gzip": gzipped(t, data), "padded": append(gzipped(t, data), make([]byte, 700)...), "zstd": zstandard(t, data)} {
		t.Run(name, func(t *testing.T) {
			got, read := tree(t), 0
			told := job
			told.Progress = func(n int) { read += n }
			answer, err := p.Unpack(t.Context(), got, bytes.NewReader(blob), told)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(answer, result) {
				t.Errorf("the process says %+v, the library %+v", answer, result)
			}
			a, b := describe(t, got.Name()), describe(t, want.Name())
			if !maps.Equal(a, b) {
				for path := range b {
					if a[path] != b[path] {
						t.Errorf("%q: %s; by the library %s", path, a[path], b[path])
					}
				}
			}
			if int64(read) > result.TarBytes {
				t.Errorf("progress to %d of %d", read, result.TarBytes)
			}
		})
	}
}

// Pack in a process writes the same files as unpack.Pack, and nothing else.
func TestPackEveryKind(t *testing.T) { eachBuild(t, time.Minute, testPackEveryKind) }

func testPackEveryKind(t *testing.T, p *Program) {
	blob := everyKind(t)
	var results [2]unpack.Result
	var files [2][2][]byte
	for i, pack := range []func(context.Context, *os.File, *os.File, io.Reader, unpack.Job) (unpack.Result, error){unpack.Pack, p.Pack} {
		dir := t.TempDir()
		var opened [2]*os.File
		for n, name := range []string{"data", "tree"} {
			f, err := os.Create(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			opened[n] = f
		}
		var err error
		if results[i], err = pack(t.Context(), opened[0], opened[1], bytes.NewReader(blob), job); err != nil {
			t.Fatal(err)
		}
		for n, f := range opened {
			if files[i][n], err = os.ReadFile(f.Name()); err != nil {
				t.Fatal(err)
			}
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
			t.Errorf("%d files, %v", len(entries), err)
		}
	}
	if !reflect.DeepEqual(results[0], results[1]) || results[0].Sum.IsZero() {
		t.Errorf("the process says %+v, the library %+v", results[1], results[0])
	}
	for n, name := range []string{"data", "tree"} {
		if !bytes.Equal(files[0][n], files[1][n]) || len(files[0][n]) == 0 {
			t.Errorf("%s differs", name)
		}
	}
}

func TestErrors(t *testing.T) { eachBuild(t, time.Minute, testErrors) }

func testErrors(t *testing.T, p *Program) {
	broken := errors.New("connection reset")
	good := everyKind(t)
	bomb := job
	bomb.Limits.Tar = 1 << 20
	for name, c := range map[string]struct {
		blob io.Reader
		job  unpack.Job
		code codes.Code
		text string
	}{
		"no tar":               {strings.NewReader(strings.Repeat("no tar", 1000)), job, codes.InvalidArgument, "invalid tar header"},
		"bad gzip":             {bytes.NewReader(gzipped(t, good)[:1000]), job, codes.DataLoss, "decompress"},
		"bomb":                 {bytes.NewReader(gzipped(t, make([]byte, 100<<20))), bomb, codes.FailedPrecondition, "longer than the 1048576 bytes"},
		"name":                 {bytes.NewReader(pack(t, file("a", ""), file("a/b\x1b[31m", ""))), job, codes.InvalidArgument, `a/b\x1b[31m`},
		"blob breaks":          {io.MultiReader(bytes.NewReader(good[:70_000]), iotest.ErrReader(broken)), job, codes.Unknown, "connection reset"},
		"blob is none":         {io.MultiReader(bytes.NewReader(good), iotest.ErrReader(errdefs.New(codes.DataLoss, "wrong digest"))), job, codes.DataLoss, "wrong digest"},
		"nothing":              {iotest.ErrReader(broken), job, codes.Unknown, "connection reset"},
		"wrapped end of file":  {io.MultiReader(bytes.NewReader(good[:70_000]), iotest.ErrReader(fmt.Errorf("transfer: %w", io.EOF))), job, codes.Unknown, "transfer: EOF"},
		"wrapped end, no data": {iotest.ErrReader(fmt.Errorf("transfer: %w", io.EOF)), job, codes.Unknown, "transfer: EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := p.Unpack(t.Context(), tree(t), c.blob, c.job)
			if errdefs.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v: %v; want %v with %q", errdefs.Code(err), err, c.code, c.text)
			}
		})
	}
}

// A panic of the blob's io.Reader becomes an error of the layer.
func TestPanic(t *testing.T) {
	p := open(t, built, time.Minute)
	blob := io.MultiReader(bytes.NewReader(everyKind(t)), panics{})
	if _, err := p.Unpack(t.Context(), tree(t), blob, job); errdefs.Code(err) != codes.Internal || !strings.Contains(err.Error(), "oh") {
		t.Errorf("%v", err)
	}
}

type panics struct{}

func (panics) Read([]byte) (int, error) { panic("oh") }

// Answers of a process that its layer compromised.
func TestFalseResultsAreRejected(t *testing.T) {
	p := liar(t)
	resultOf := func(change func(*unpack.Result)) []byte {
		r := unpack.Result{Digest: digest.FromString("x"), TarBytes: 1}
		change(&r)
		var b bytes.Buffer
		if err := worker.NewWriter(&b).Result(r); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	emptyResult := resultOf(func(*unpack.Result) {})
	long := bytes.Repeat(append([]byte{'I', 0, 0, 0x10, 0}, bytes.Repeat([]byte("x"), 4096)...), 2000)
	for name, c := range map[string]struct {
		says []byte
		text string
	}{
		"garbage":             {[]byte("garbage, garbage"), "berth-unpack: "},
		"names without end":   {long, "bytes of names"},
		"nothing":             {nil, "died: exit status 0"},
		"result before blob":  {emptyResult, "before the end of the blob"},
		"a tar too long":      {resultOf(func(r *unpack.Result) { r.TarBytes = job.Limits.WithDefaults().Tar + 1 }), "allowed"},
		"too many files":      {resultOf(func(r *unpack.Result) { r.Inodes = 1 << 40 }), "possible"},
		"too much on disk":    {resultOf(func(r *unpack.Result) { r.Bytes, r.Inodes = 1<<50, 1 }), "bytes on disk"},
		"a way out of a tree": {append([]byte("O\x00\x00\x00\x04../x"), emptyResult...), "../x"},
	} {
		t.Run(name, func(t *testing.T) {
			var blob io.Reader = bytes.NewReader(c.says)
			if name == "result before blob" {
				blob = io.MultiReader(blob, zeros{})
			}
			_, err := p.Unpack(t.Context(), tree(t), blob, job)
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want %q", err, c.text)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
