// Package packaging tests the packages that contrib/package builds.
package packaging

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/cobra"

	"berth/cmd/berth/commands"
	"berth/cmd/config"
	"berth/internal/testutil"
)

// version is the version of the packages under test.
const version = "1.2.3~test"

// built has the packages of this test run, by architecture. Building them takes seconds.
var built = map[string]*set{"amd64": {}, "arm64": {}}

type set struct {
	sync.Once
	dir string
	err error
}

func TestMain(m *testing.M) {
	code := m.Run()
	for _, b := range built {
		if b.dir != "" {
			_ = os.RemoveAll(b.dir)
		}
	}
	os.Exit(code)
}

// programs returns the directory of the programs for an architecture, below BERTH_BIN.
func programs(arch string) string {
	if arch == runtime.GOARCH {
		return os.Getenv("BERTH_BIN")
	}
	return filepath.Join(os.Getenv("BERTH_BIN"), arch)
}

// packages returns the directory of packages made from the programs in BERTH_BIN.
func packages(t *testing.T) string {
	t.Helper()
	return packagesFor(t, runtime.GOARCH)
}

// packagesFor returns the directory of packages for an architecture.
func packagesFor(t *testing.T, arch string) string {
	t.Helper()
	if os.Getenv("BERTH_BIN") == "" {
		t.Skip("BERTH_BIN is not set: run contrib/build and export BERTH_BIN=$PWD/bin")
	}
	if _, err := os.Stat(filepath.Join(programs(arch), "berthd")); err != nil {
		t.Skipf("NOT TESTED: packages for %s: run GOARCH=%s contrib/build (%v)", arch, arch, err)
	}
	b := built[arch]
	b.Do(func() {
		if b.dir, b.err = os.MkdirTemp("", "berth-packages-"); b.err == nil {
			b.err = build(b.dir, arch)
		}
	})
	if b.err != nil {
		t.Fatal(b.err)
	}
	return b.dir
}

// build writes the three packages for an architecture to dir.
func build(dir, arch string) error {
	cmd := exec.Command("../package", "-bin", programs(arch), "-o", dir, "deb", "rpm", "tarball")
	cmd.Env = append(os.Environ(), "GOARCH="+arch, "BERTH_PACKAGE_VERSION="+version, "SOURCE_DATE_EPOCH=1700000000")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("contrib/package: %w\n%s", err, out)
	}
	return nil
}

// one returns the path of the only file in dir that matches pattern.
func one(t *testing.T, dir, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %v, %v", pattern, found, err)
	}
	return found[0]
}

// file is an entry of a package: its type and mode as ls prints them, and its owner.
type file struct{ path, mode, owner string }

// want returns the files of a package. Programs and shared files are below prefix, CNI plugins in
// cni, and zsh's completions in zsh.
func want(prefix, cni, zsh string) []file {
	const data, program = "-rw-r--r--", "-rwxr-xr-x"
	all := []file{
		{prefix + "/bin/berth", program, ""},
		{prefix + "/bin/berthd", program, ""},
		{prefix + "/bin/berth-shim", program, ""},
		{prefix + "/bin/berth-unpack", program, ""},
		{prefix + "/bin/berth-verify", program, ""},
		{prefix + "/bin/berth-task", program, ""},
		{prefix + "/bin/berth-stream", program, ""},
		{cni + "/berth-net", program, ""},
		{prefix + "/lib/systemd/system/berth.service", data, ""},
		{prefix + "/lib/systemd/system/berth.socket", data, ""},
		{prefix + "/lib/modules-load.d/berth.conf", data, ""},
		{prefix + "/lib/sysctl.d/60-berth.conf", data, ""},
		{prefix + "/lib/tmpfiles.d/berth.conf", data, ""},
		{prefix + "/share/bash-completion/completions/berth", data, ""},
		{zsh + "/_berth", data, ""},
		{prefix + "/share/fish/vendor_completions.d/berth.fish", data, ""},
		{prefix + "/share/berth/examples/10-berth.conflist", data, ""},
		{prefix + "/share/berth/examples/crictl.yaml", data, ""},
		{prefix + "/share/berth/monitoring/berth-rules.yaml", data, ""},
		{prefix + "/share/berth/monitoring/prometheusrule.yaml", data, ""},
		{prefix + "/share/berth/monitoring/podmonitor.yaml", data, ""},
		{prefix + "/share/berth/monitoring/berth.json", data, ""},
		{prefix + "/share/berth/selinux/berth.cil", data, ""},
	}
	examples, err := filepath.Glob("../examples/*.yaml")
	if err != nil {
		panic(err)
	}
	for _, e := range examples {
		all = append(all, file{prefix + "/share/berth/examples/" + filepath.Base(e), data, ""})
	}
	for _, page := range append(manPages(commands.Root()), "berthd.8.gz") {
		all = append(all, file{prefix + "/share/man/man8/" + page, data, ""})
	}
	return all
}

// fallback is the script that starts the previous version if the installed one cannot start.
var fallback = file{"/usr/lib/berth/fallback", "-rwxr-xr-x", ""}

// manPages returns the names of the man pages of a command and its subcommands.
func manPages(c *cobra.Command) []string {
	pages := []string{strings.ReplaceAll(c.CommandPath(), " ", "-") + ".8.gz"}
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() && !sub.IsAdditionalHelpTopicCommand() {
			pages = append(pages, manPages(sub)...)
		}
	}
	return pages
}

// compare reports the difference of two lists of files.
func compare(t *testing.T, got, want []file) {
	t.Helper()
	for _, f := range got {
		if !slices.Contains(want, f) {
			t.Errorf("unexpected: %s", f)
		}
	}
	for _, f := range want {
		if !slices.Contains(got, f) {
			t.Errorf("missing: %s", f)
		}
	}
}

// owned returns files with the owner that ls prints.
func owned(files []file, owner string) []file {
	files = slices.Clone(files)
	for i := range files {
		files[i].owner = owner
	}
	return files
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skip(err)
	}
	var stderr bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, &stderr)
	}
	return string(out)
}

// searched reports an error if berth does not search for plugins in the directory of the package's.
// Other packages of the distribution install their plugins there, too.
func searched(t *testing.T, files []file) {
	t.Helper()
	dirs := config.Default().CNIBinDirs
	for _, f := range files {
		if dir, name := filepath.Split(f.path); name == "berth-net" && !slices.Contains(dirs, filepath.Clean(dir)) {
			t.Errorf("%s is not among the default directories of plugins %q", dir, dirs)
		}
	}
}

func TestDebContents(t *testing.T) {
	deb := one(t, packages(t), "berth_"+version+"_*.deb")
	var got []file
	for line := range strings.Lines(run(t, "dpkg-deb", "--contents", deb)) {
		words := strings.Fields(line)
		if path := strings.TrimPrefix(words[5], "."); !strings.HasSuffix(path, "/") || strings.HasPrefix(path, "/etc/berth/") {
			got = append(got, file{path, words[0], words[1]})
		}
	}
	searched(t, got)
	compare(t, got, owned(append(want("/usr", "/usr/lib/cni", "/usr/share/zsh/vendor-completions"),
		fallback,
		file{"/etc/berth/", "drwxr-xr-x", ""}, file{"/etc/berth/certs.d/", "drwxr-xr-x", ""}, file{"/etc/berth/config.d/", "drwxr-xr-x", ""}, file{"/etc/berth/images.d/", "drwxr-xr-x", ""},
		file{"/etc/berth/config.toml", "-rw-r--r--", ""},
		file{"/usr/share/doc/berth/copyright", "-rw-r--r--", ""}, file{"/usr/share/doc/berth/changelog.gz", "-rw-r--r--", ""},
		file{"/usr/share/doc/berth/third-party-licenses.gz", "-rw-r--r--", ""}), "root/root"))
}

func TestDebControl(t *testing.T) {
	deb := one(t, packages(t), "berth_"+version+"_*.deb")
	dir := t.TempDir()
	run(t, "dpkg-deb", "--control", deb, dir)
	for name, parts := range map[string][]string{
		"conffiles": {"/etc/berth/config.toml\n"},
		"control":   {"Package: berth\n", "Version: " + version + "\n", "Depends: libc6 (>= 2.", "\nBuilt-Using: glibc (= ", ", libseccomp (= "},
	} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		for _, part := range parts {
			if err != nil || !strings.Contains(string(content), part) {
				t.Errorf("%s lacks %q: %v\n%s", name, part, err, content)
			}
		}
	}
	for _, name := range []string{"preinst", "postinst", "prerm", "postrm"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
		run(t, "sh", "-n", filepath.Join(dir, name))
	}
}

func TestRPMContents(t *testing.T) {
	rpm := one(t, packages(t), "berth-"+version+"-1.*.rpm")
	var got []file
	for line := range strings.Lines(run(t, "rpm", "-q", "--nosignature", "-p", "--queryformat",
		"[%{FILENAMES} %{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME}\n]", rpm)) {
		words := strings.Fields(line)
		got = append(got, file{words[0], words[1], words[2]})
	}
	searched(t, got)
	compare(t, got, owned(append(want("/usr", "/usr/libexec/cni", "/usr/share/zsh/site-functions"),
		fallback,
		file{"/etc/berth", "drwxr-xr-x", ""}, file{"/etc/berth/certs.d", "drwxr-xr-x", ""}, file{"/etc/berth/config.d", "drwxr-xr-x", ""}, file{"/etc/berth/images.d", "drwxr-xr-x", ""}, file{"/usr/share/berth", "drwxr-xr-x", ""},
		file{"/etc/berth/config.toml", "-rw-r--r--", ""}, file{"/usr/share/licenses/berth/LICENSE", "-rw-r--r--", ""},
		file{"/usr/share/licenses/berth/third-party-licenses.gz", "-rw-r--r--", ""}), "root/root"))
	if out := run(t, "rpm", "-q", "--nosignature", "-p", "--configfiles", rpm); out != "/etc/berth/config.toml\n" {
		t.Errorf("configuration files: %q", out)
	}
}

func TestTarballContents(t *testing.T) {
	f, err := os.Open(one(t, packages(t), "berth-"+version+"-linux-*.tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var got []file
	for r := tar.NewReader(unzipped); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			_, path, _ := strings.Cut(h.Name, "/")
			owner := fmt.Sprintf("%d/%d", h.Uid, h.Gid)
			got = append(got, file{"/" + path, h.FileInfo().Mode().String(), owner})
		}
	}
	compare(t, got, owned(append(want("", "/libexec/cni", "/share/zsh/site-functions"),
		file{"/share/berth/examples/config.toml", "-rw-r--r--", ""}, file{"/share/berth/LICENSE", "-rw-r--r--", ""},
		file{"/share/berth/third-party-licenses.gz", "-rw-r--r--", ""}), "0/0"))
}

// The packages of both architectures have the same files. Each program is for the package's
// architecture, and is linked statically or not as on the other.
func TestPackagesOfBothArchitectures(t *testing.T) {
	type content struct {
		files  string
		static map[string]bool
	}
	var contents []content
	for _, arch := range []struct {
		name, cpu string
		machine   elf.Machine
	}{{"amd64", "x86_64", elf.EM_X86_64}, {"arm64", "aarch64", elf.EM_AARCH64}} {
		from, dir := packagesFor(t, arch.name), t.TempDir()
		deb := one(t, from, "berth_"+version+"_"+arch.name+".deb")
		if got := run(t, "dpkg-deb", "--field", deb, "Architecture"); got != arch.name+"\n" {
			t.Errorf("the deb is for %q", got)
		}
		if using := run(t, "dpkg-deb", "--field", deb, "Built-Using"); !strings.Contains(using, "libseccomp (= ") {
			t.Errorf("%s: built using %q", arch.name, using)
		}
		rpm := one(t, from, "berth-"+version+"-1."+arch.cpu+".rpm")
		if got := run(t, "rpm", "-q", "--nosignature", "-p", "--queryformat", "%{ARCH}", rpm); got != arch.cpu {
			t.Errorf("the rpm is for %q", got)
		}
		one(t, from, "berth-"+version+"-linux-"+arch.name+".tar.gz")
		run(t, "dpkg-deb", "--extract", deb, dir)
		c := content{static: map[string]bool{}}
		paths, err := filepath.Glob(filepath.Join(dir, "usr/bin/*"))
		testutil.Must(t, err)
		for _, path := range append(paths, filepath.Join(dir, "usr/lib/cni/berth-net")) {
			program, err := elf.Open(path)
			testutil.Must(t, err)
			if program.Machine != arch.machine {
				t.Errorf("%s is for %s", path, program.Machine)
			}
			c.static[filepath.Base(path)] = program.Section(".interp") == nil
			testutil.Must(t, program.Close())
		}
		c.files = strings.Join(files(t, dir), "\n")
		contents = append(contents, c)
	}
	if !reflect.DeepEqual(contents[0], contents[1]) || len(contents[0].static) < 8 {
		t.Errorf("amd64: %v\narm64: %v", contents[0], contents[1])
	}
}

func TestPackagesAreReproducible(t *testing.T) {
	first, second := packages(t), t.TempDir()
	if err := build(second, runtime.GOARCH); err != nil {
		t.Fatal(err)
	}
	names, err := os.ReadDir(first)
	if err != nil || len(names) != 3 {
		t.Fatalf("%v, %v", names, err)
	}
	for _, n := range names {
		a, errA := os.ReadFile(filepath.Join(first, n.Name()))
		b, errB := os.ReadFile(filepath.Join(second, n.Name()))
		if err := cmp.Or(errA, errB); err != nil || !bytes.Equal(a, b) {
			t.Errorf("two builds of %s differ: %v", n.Name(), err)
		}
	}
}

func TestManPagesAreReadable(t *testing.T) {
	dir := t.TempDir()
	run(t, "dpkg-deb", "--extract", one(t, packages(t), "*.deb"), dir)
	if _, err := exec.LookPath("man"); err != nil {
		t.Skip(err)
	}
	for page, text := range map[string]string{"berth.8.gz": "SEE ALSO", "berth-config-check.8.gz": "--listen", "berthd.8.gz": "--listen"} {
		cmd := exec.Command("man", "--local-file", "--warnings", filepath.Join(dir, "usr/share/man/man8", page))
		cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "MANWIDTH=200", "MANPAGER=cat")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil || stderr.Len() > 0 || !strings.Contains(string(out), text) {
			t.Errorf("%s: %v, %s\n%s", page, err, &stderr, out)
		}
	}
}

func TestCompletionScriptsParse(t *testing.T) {
	dir := t.TempDir()
	run(t, "dpkg-deb", "--extract", one(t, packages(t), "*.deb"), dir)
	for shell, script := range map[string]string{
		"bash": "usr/share/bash-completion/completions/berth",
		"zsh":  "usr/share/zsh/vendor-completions/_berth",
		"fish": "usr/share/fish/vendor_completions.d/berth.fish",
	} {
		t.Run(shell, func(t *testing.T) { run(t, shell, "-n", filepath.Join(dir, script)) })
	}
}

func TestUnitFilesAreValid(t *testing.T) {
	dir := t.TempDir()
	run(t, "dpkg-deb", "--extract", one(t, packages(t), "*.deb"), dir)
	units := filepath.Join(dir, "usr/lib/systemd/system")
	for _, unit := range []string{"berth.service", "berth.socket"} {
		path := filepath.Join(units, unit)
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		// systemd-analyze looks for the program on this machine.
		for _, program := range []string{"/usr/bin/berth", "/usr/lib/berth/"} {
			content = bytes.ReplaceAll(content, []byte(program), []byte(dir+program))
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// Other warnings concern this machine.
	cmd := exec.Command("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", filepath.Join(units, "berth.service"), filepath.Join(units, "berth.socket"))
	out, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip(err)
	}
	if err != nil || strings.Contains(string(out), "berth.") {
		t.Errorf("systemd-analyze: %v\n%s", err, out)
	}
}

// The packaged configuration sets nothing, and its comments show valid options.
func TestPackagedConfigurationIsValid(t *testing.T) {
	content, err := os.ReadFile("files/config.toml")
	if err != nil {
		t.Fatal(err)
	}
	if c, err := config.Parse("config.toml", content); err != nil || !reflect.DeepEqual(c, config.Default()) {
		t.Errorf("%v, %+v", err, c)
	}
	options := regexp.MustCompile(`(?m)^# (\[|\w+ = )`).ReplaceAll(content, []byte("$1"))
	if c, err := config.Parse("config.toml", options); err != nil || c.Network != "berth-net" {
		t.Errorf("%v\n%s", err, options)
	}
}

// chroot returns a directory with a shell and the programs that maintainer scripts use. It
// resembles the root of an image during its build.
func chroot(t *testing.T) string {
	t.Helper()
	testutil.NeedRoot(t)
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	for _, name := range []string{"bin", "dev", "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/rpm"} {
		testutil.Must(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "bin/busybox"), busybox, 0o755))
	for _, name := range []string{"sh", "rm", "rmdir", "mkdir", "ln", "cp"} {
		testutil.Must(t, os.Symlink("busybox", filepath.Join(dir, "bin", name)))
	}
	for _, name := range []string{"dev/null", "var/lib/dpkg/status"} {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	return dir
}

// files returns the regular files in dir whose paths contain "berth", without the package
// manager's.
func files(t *testing.T, dir string) (found []string) {
	t.Helper()
	testutil.Must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		path = strings.TrimPrefix(path, dir)
		if err == nil && !e.IsDir() && strings.Contains(path, "berth") && !strings.HasPrefix(path, "/var/lib/dpkg/") {
			found = append(found, path)
		}
		return err
	}))
	return found
}

// An image build installs packages into a directory, without systemd, /proc and a network.
func TestDebInChroot(t *testing.T) {
	deb := one(t, packages(t), "*.deb")
	dir := chroot(t)
	dpkg := func(args ...string) {
		run(t, "dpkg", append([]string{"--root=" + dir, "--force-depends"}, args...)...)
	}
	dpkg("--install", deb)
	if !slices.Contains(files(t, dir), "/usr/bin/berth") {
		t.Errorf("after the installation: %v", files(t, dir))
	}
	dpkg("--install", deb) // an upgrade
	dpkg("--remove", "berth")
	want := []string{"/etc/berth/config.toml"}
	for _, kept := range []string{"berth", "berth-shim", "berth-stream", "berth-task", "berth-unpack", "berth-verify", "etc/config.toml"} {
		want = append(want, "/var/lib/berth/uninstall/"+kept)
	}
	if got := files(t, dir); !slices.Equal(got, want) {
		t.Errorf("after the removal: %v", got)
	}
	dpkg("--purge", "berth")
	if got := files(t, dir); len(got) > 0 {
		t.Errorf("after the purge: %v", got)
	}
}

func TestRPMInChroot(t *testing.T) {
	rpm := one(t, packages(t), "*.rpm")
	dir := chroot(t)
	command := func(args ...string) {
		run(t, "rpm", append([]string{"--root", dir, "--dbpath", "/var/lib/rpm", "--nodeps", "--nosignature"}, args...)...)
	}
	command("--install", rpm)
	if !slices.Contains(files(t, dir), "/usr/bin/berth") {
		t.Errorf("after the installation: %v", files(t, dir))
	}
	command("--upgrade", "--replacepkgs", "--replacefiles", rpm)
	command("--erase", "berth")
	if got := files(t, dir); len(got) > 0 {
		t.Errorf("after the removal: %v", got)
	}
}
