package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// script returns a copy of a package's script that works below dir, and whose commands are first
// looked up in dir/bin.
func script(t *testing.T, dir, name string) func(args ...string) (string, error) {
	t.Helper()
	content, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	below := strings.NewReplacer("/var/lib/", dir+"/var/lib/", "/run/", dir+"/run/", "/etc/", dir+"/etc/",
		"/usr/bin/", dir+"/usr/bin/", "/usr/lib/berth", dir+"/usr/lib/berth")
	text := below.Replace(string(content))
	path := filepath.Join(dir, filepath.Base(name))
	writeProgram(t, path, text)
	// A kernel may lack the module.
	writeProgram(t, dir+"/bin/modprobe", "#!/bin/sh\necho \"$@\" >"+dir+"/modules\nexit 1\n")
	return func(args ...string) (string, error) {
		cmd := exec.Command("sh", append([]string{path}, args...)...)
		cmd.Env = append(os.Environ(), "PATH="+dir+"/bin:"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
}

func writeProgram(t *testing.T, path, text string) {
	t.Helper()
	for _, err := range []error{os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// An upgrade of a daemon that serves keeps the installed programs. If the new daemon ends before it
// serves, the next start executes the kept one, until another upgrade. Version "bad" ends at once.
func TestFallback(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keep, fallback := script(t, dir, "keep"), script(t, dir, "files/fallback")
	serves := func(code string) { writeProgram(t, dir+"/bin/systemctl", "#!/bin/sh\nexit "+code+"\n") }
	serves("0")
	// start does what systemd does with the unit.
	start := func(want string) {
		t.Helper()
		out, err := fallback("start")
		after := "started"
		if err != nil {
			after = "ended" // SERVICE_RESULT is not "success"
		}
		if _, err := fallback(after); err != nil || !strings.HasSuffix(out, want+"\n") {
			t.Errorf("%v, %q; want %s", err, out, want)
		}
	}
	installs := func(version string, args ...string) {
		t.Helper()
		if out, err := keep(args...); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		// As dpkg does, without a change of the file.
		testutil.Must(t, os.RemoveAll(dir+"/usr/bin/berthd"))
		writeProgram(t, dir+"/usr/bin/berthd", "#!/bin/sh\necho "+version+"\n[ "+version+" != bad ]\n")
	}
	installs("1", "install")
	start("1")
	installs("bad", "upgrade", "1")
	start("bad")
	start("1")
	start("1")
	installs("bad", "2") // by rpm
	start("bad")
	start("1")
	installs("2", "upgrade", "1")
	start("2")
	for range 2 { // the second crash is after an upgrade, before the new version starts
		if _, err := fallback("ended"); err != nil {
			t.Error(err)
		}
		start("2")
		installs("2", "upgrade", "2")
	}
	serves("3") // no version to fall back to
	installs("bad", "upgrade", "2")
	start("bad")
	start("bad")
}

// An upgrade does not restart the daemon if the new version cannot take over. It fails if the new
// daemon does not start, and says that the previous one serves.
func TestUpgradeFallsBack(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, check, daemon, want, done string }{
		{"good", "exit 0", "exit 0", "", "restart\n"},
		{"refused", "exit 1", "exit 0", "cannot take over this node. The previous daemon keeps running", ""},
		{"broken", "exit 0", "exit 1", "does not start, so systemd starts the previous version", "restart\n"},
	} {
		for name, args := range map[string][]string{"deb/postinst": {"configure", "1"}, "rpm/post": {"2"}} {
			t.Run(tt.name+" "+name, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				script(t, dir, "files/fallback")
				testutil.Must(t, os.MkdirAll(dir+"/usr/lib/berth/previous", 0o755))
				testutil.Must(t, os.MkdirAll(dir+"/run/systemd/system", 0o755))
				testutil.Must(t, os.Rename(dir+"/fallback", dir+"/usr/lib/berth/fallback"))
				writeProgram(t, dir+"/usr/lib/berth/previous/untried", "")
				writeProgram(t, dir+"/usr/bin/berth", "#!/bin/sh\n"+tt.check+"\n")
				writeProgram(t, dir+"/usr/bin/berthd", "#!/bin/sh\n"+tt.daemon+"\n")
				writeProgram(t, dir+"/bin/systemctl", `#!/bin/sh
[ "$1" = restart ] || exit 0
echo restart >>`+dir+`/done
`+dir+`/usr/lib/berth/fallback start || { `+dir+`/usr/lib/berth/fallback ended; exit 1; }
`)
				out, err := script(t, dir, name)(args...)
				done, _ := os.ReadFile(dir + "/done") // missing: no restart
				if modules, err := os.ReadFile(dir + "/modules"); string(modules) != "-q br_netfilter\n" {
					t.Errorf("loads the modules %q, %v", modules, err)
				}
				_, failed := os.Stat(dir + "/usr/lib/berth/previous/failed")
				ok := tt.want == ""
				if (err == nil) != ok || !strings.Contains(out, tt.want) || string(done) != tt.done || (failed != nil) != ok {
					t.Errorf("%v, restarts %q, failed: %v\n%s", err, done, failed, out)
				}
			})
		}
	}
}

// After an aborted upgrade the installed version counts as before: a version that has served is
// never replaced by the kept one, and an untried one can be.
func TestAbortedUpgrade(t *testing.T) {
	t.Parallel()
	for before, untried := range map[string]bool{"": false, "untried": true, "failed": true} {
		t.Run("before: "+before, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			script(t, dir, "files/fallback")
			kept := dir + "/usr/lib/berth/previous/"
			testutil.Must(t, os.MkdirAll(kept, 0o755))
			testutil.Must(t, os.Rename(dir+"/fallback", dir+"/usr/lib/berth/fallback"))
			writeProgram(t, dir+"/bin/systemctl", "#!/bin/sh\n")
			if before != "" {
				writeProgram(t, kept+before, "served\n")
			}
			for _, run := range []struct{ script, arg string }{{"keep", "upgrade"}, {"deb/postinst", "abort-upgrade"}} {
				if out, err := script(t, dir, run.script)(run.arg, "2"); err != nil {
					t.Fatalf("%s: %v: %s", run.script, err, out)
				}
			}
			if _, err := os.Stat(kept + "untried"); (err == nil) != untried {
				t.Errorf("untried: %v", err)
			}
		})
	}
}

// A downgrade to a version without fallback leaves none of its files. Other upgrades keep them.
func TestDowngradeRemovesKeptPrograms(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, script string
		args         []string
		fallback     bool // of the other version
		kept         bool
	}{
		{"deb to 0.2", "deb/postrm", []string{"upgrade", "0.2.0"}, true, false}, // dpkg removes the script later
		{"deb to this", "deb/postrm", []string{"upgrade", "0.3.0"}, true, true},
		{"deb aborted", "deb/postrm", []string{"abort-upgrade", "0.2.0"}, true, true},
		{"deb removed", "deb/postrm", []string{"remove"}, true, false},
		{"rpm to 0.2", "rpm/postun", []string{"1"}, false, false},
		{"rpm to this", "rpm/postun", []string{"1"}, true, true},
		{"rpm removed", "rpm/postun", []string{"0"}, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			failed := dir + "/usr/lib/berth/previous/failed"
			writeProgram(t, failed, "")
			if tt.fallback {
				writeProgram(t, dir+"/usr/lib/berth/fallback", "")
			}
			writeProgram(t, dir+"/bin/dpkg", "#!/bin/sh\n[ \"$1 $3 $4\" = '--compare-versions ge 0.3' ] && [ \"$2\" = 0.3.0 ]\n")
			if out, err := script(t, dir, tt.script)(tt.args...); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if _, err := os.Stat(failed); (err == nil) != tt.kept {
				t.Errorf("the kept programs: %v", err)
			}
		})
	}
}

// The first installation leaves the choice of the runtime to the operator of a node that has one.
func TestInstallationBesideAnotherRuntime(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		enabled string
		preset  bool
	}{{"", true}, {"containerd.service", false}, {"crio.service", false}, {"docker.service", true}} {
		for name, args := range map[string][]string{"deb/postinst": {"configure", ""}, "rpm/post": {"1"}} {
			t.Run(name+" "+tt.enabled, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				writeProgram(t, dir+"/bin/systemctl", `#!/bin/sh
case "$1 $2 $3" in
"is-enabled --quiet `+tt.enabled+`") exit 0 ;;
is-enabled*) exit 1 ;;
preset*) echo preset >>`+dir+`/done ;;
esac
`)
				if out, err := script(t, dir, name)(args...); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				done, _ := os.ReadFile(dir + "/done") // missing: systemctl was not asked
				if preset := string(done) == "preset\n"; preset != tt.preset {
					t.Errorf("the unit got its preset: %v", preset)
				}
			})
		}
	}
}

// A removal keeps copies for a purge. It succeeds without a configuration, and if the disk is full.
func TestRemovalKeepsCopies(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name            string
		configured, fit bool
	}{{"configured", true, true}, {"without configuration", false, true}, {"disk full", true, false}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			prerm := script(t, dir, "deb/prerm")
			for _, name := range []string{"berth", "berth-shim", "berth-unpack", "berth-verify", "berth-task", "berth-stream"} {
				writeProgram(t, dir+"/usr/bin/"+name, "#!/bin/sh\n")
			}
			if tt.configured {
				writeProgram(t, dir+"/etc/berth/config.toml", "")
			}
			if !tt.fit {
				writeProgram(t, dir+"/bin/ln", "#!/bin/sh\nexit 1\n") // another file system
				writeProgram(t, dir+"/bin/cp", "#!/bin/sh\nexit 1\n")
			}
			testutil.Must(t, os.MkdirAll(dir+"/var/lib", 0o755))
			out, err := prerm("remove")
			if err != nil || strings.Contains(out, "berth reset") == tt.fit {
				t.Errorf("error %v: %s", err, out)
			}
			keep := dir + "/var/lib/berth/uninstall"
			for path, want := range map[string]bool{"/berth-stream": tt.fit, "/etc/config.toml": tt.fit && tt.configured, "": tt.fit} {
				if _, err := os.Stat(keep + path); (err == nil) != want {
					t.Errorf("%s: %v, want it: %v", keep+path, err, want)
				}
			}
		})
	}
}

// A purge that has no program to remove the pods leaves their state.
func TestPurgeWithoutCopiesKeepsPods(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	record := dir + "/var/lib/berth/pods/x"
	writeProgram(t, record, "")
	writeProgram(t, dir+"/bin/ischroot", "#!/bin/sh\nexit 1\n")
	purge := script(t, dir, "deb/postrm")
	out, err := purge("purge")
	if _, missing := os.Stat(record); err == nil || missing != nil || !strings.Contains(out, "berth reset") {
		t.Errorf("error %v, record: %v: %s", err, missing, out)
	}
	testutil.Must(t, os.Remove(record))
	if out, err := purge("purge"); err != nil {
		t.Errorf("error %v: %s", err, out)
	}
}

// Mount points and targets of links belong to the administrator: a purge empties them.
func TestPurgeKeepsMountPoints(t *testing.T) {
	testutil.NeedRoot(t)
	for name, prepare := range map[string]string{
		"directory":     "mkdir -p $D/var/lib/berth",
		"mount point":   "mkdir -p $D/var/lib/berth; mount -t tmpfs x $D/var/lib/berth",
		"link":          "mkdir -p $D/disk/berth $D/var/lib; ln -s $D/disk/berth $D/var/lib/berth",
		"link to mount": "mkdir -p $D/disk $D/var/lib; mount -t tmpfs x $D/disk; ln -s $D/disk $D/var/lib/berth",
		"dangling link": "mkdir -p $D/var/lib; ln -s $D/none $D/var/lib/berth",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			script(t, dir, "deb/postrm")
			cmd := exec.Command("unshare", "--mount", "sh", "-ec", prepare+`
if [ -d $D/var/lib/berth ]; then mkdir -p $D/var/lib/berth/images/x; echo x >$D/var/lib/berth/images/x/y; fi
mkdir -p $D/run/berth $D/etc/berth/config.d
sh $D/postrm purge
for left in $D/var/lib/berth/* $D/run/berth $D/etc/berth; do [ ! -e "$left" ] || echo "left: $left"; done
[ ! -d $D/var/lib/berth ] || echo stays`)
			cmd.Env = append(os.Environ(), "D="+dir)
			out, err := cmd.CombinedOutput()
			want := "stays\n"
			if name == "directory" || name == "dangling link" {
				want = ""
			}
			if err != nil || string(out) != want {
				t.Errorf("error %v, output %q, want %q", err, out, want)
			}
		})
	}
}

// unattended-upgrades holds apt's locks for minutes on a new machine.
func TestScriptsWaitForApt(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		message string
		ok      bool
	}{
		"lists":    {"E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)", true},
		"frontend": {"E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?", true},
		"dpkg":     {"E: Unable to lock directory /var/cache/apt/archives/", true},
		"other":    {"E: Unable to locate package x", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			writeProgram(t, dir+"/bin/apt-get", `#!/bin/sh
echo "$@" >>`+dir+`/calls
[ "$(wc -l <`+dir+`/calls)" -lt 3 ] || exit 0
echo '`+tt.message+`' >&2
exit 100
`)
			cmd := exec.Command("bash", "-c", ". ../lib.sh; apt_get update")
			cmd.Env = append(os.Environ(), "PATH="+dir+"/bin:"+os.Getenv("PATH"), "BERTH_APT_PAUSE=0")
			out, err := cmd.CombinedOutput()
			if (err == nil) != tt.ok || !tt.ok && !strings.Contains(string(out), tt.message) {
				t.Errorf("error %v: %s", err, out)
			}
			calls, err := os.ReadFile(dir + "/calls")
			if err != nil || !strings.Contains(string(calls), "DPkg::Lock::Timeout") {
				t.Errorf("calls %q, error %v", calls, err)
			}
		})
	}
}

// A release is built only from a clean checkout, at the annotated tag of its version, with a
// section of the changelog.
func TestReleaseNeedsItsTag(t *testing.T) {
	dir, out := t.TempDir(), t.TempDir()
	for _, name := range []string{"contrib/release", "contrib/lib.sh", "go.mod"} {
		content, err := os.ReadFile("../../" + name)
		testutil.Must(t, err)
		writeProgram(t, filepath.Join(dir, name), string(content))
	}
	writeProgram(t, filepath.Join(dir, "VERSION"), "9.9.9\n")
	writeProgram(t, filepath.Join(out, "old"), "") // the first error of a release that may be built
	git := func(args ...string) {
		run(t, "git", append([]string{"-C", dir, "-c", "user.name=a", "-c", "user.email=a@b"}, args...)...)
	}
	commit := func(changelog string) {
		writeProgram(t, filepath.Join(dir, "CHANGELOG.md"), changelog)
		git("add", ".")
		git("commit", "-q", "-m", changelog)
	}
	git("init", "-q")
	commit("## 9.9.8")
	for _, step := range []struct {
		do   func()
		want string
	}{
		{func() {}, "the tag of HEAD is missing"},
		{func() { git("tag", "v9.9.9") }, "the tag of HEAD is missing"}, // not annotated
		{func() { git("tag", "-d", "v9.9.9"); git("tag", "-a", "-m", "x", "v9.9.8") }, "the tag of HEAD is v9.9.8"},
		{func() { git("tag", "-d", "v9.9.8"); git("tag", "-a", "-m", "x", "v9.9.9") }, "CHANGELOG.md has no section 9.9.9"},
		{func() { git("tag", "-d", "v9.9.9"); commit("## 9.9.9"); git("tag", "-a", "-m", "x", "v9.9.9") }, "is not empty"},
		{func() { writeProgram(t, filepath.Join(dir, "new"), "") }, "the checkout has changes"},
	} {
		step.do()
		cmd := exec.Command(filepath.Join(dir, "contrib/release"), "-o", out)
		if output, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(output), step.want) {
			t.Errorf("%v, want %q\n%s", err, step.want, output)
		}
	}
}
