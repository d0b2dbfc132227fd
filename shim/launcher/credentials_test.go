package launcher

import (
	"fmt"
	"os"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/testutil"
	"berth/shim/launcher/criuimages"
)

// status returns the status of a held thread with fields replaced.
func status(change map[string]string) string {
	fields := map[string]string{
		"State": "t (tracing stop)", "TracerPid": "9", "Uid": "5\t5\t5\t5", "Gid": "6\t6\t6\t6", "Groups": "6 8",
		"CapInh": "0", "CapPrm": "0", "CapEff": "0", "CapBnd": "00000000000000c1", "CapAmb": "0", "NoNewPrivs": "1", "Seccomp": "2",
		"Seccomp_filters": "1", "NSpid": "4007\t7", "NStgid": "4005\t5",
	}
	for name, value := range change {
		fields[name] = value
	}
	var b strings.Builder
	for name, value := range fields {
		fmt.Fprintf(&b, "%s:\t%s\n", name, value)
	}
	return b.String()
}

func TestRestoredRights(t *testing.T) {
	bounding := []string{"CAP_CHOWN", "CAP_SETGID", "CAP_SETUID"} // bits 0, 6 and 7
	user := func(uid uint32) *specs.Spec {
		return &specs.Spec{
			Process: &specs.Process{
				User:            specs.User{UID: uid, GID: 6, AdditionalGids: []uint32{8}},
				Capabilities:    &specs.LinuxCapabilities{Bounding: bounding, Permitted: bounding},
				NoNewPrivileges: true,
			},
			Linux: &specs.Linux{Seccomp: &specs.LinuxSeccomp{}},
		}
	}
	ambient := user(5)
	ambient.Process.Capabilities.Ambient = []string{"CAP_SETUID"}
	for _, test := range []struct {
		name   string
		spec   *specs.Spec
		change map[string]string
		want   string // part of the problem; empty: none
	}{
		{"same", user(5), nil, ""},
		{"user", user(5), map[string]string{"Uid": "5 5 0 5"}, "user IDs"},
		{"user of root", user(0), map[string]string{"Uid": "5 5 0 5"}, ""},
		{"user with ambient capability", ambient, map[string]string{"Uid": "9 9 9 9", "CapPrm": "80", "CapAmb": "80"}, ""},
		{"group", user(5), map[string]string{"Gid": "6 6 6 0"}, "group IDs"},
		{"supplementary group", user(5), map[string]string{"Groups": "8 9"}, "supplementary groups"},
		{"supplementary group of root", user(0), map[string]string{"Groups": "8 9"}, ""},
		{"fewer groups", user(5), map[string]string{"Groups": ""}, ""},
		{"no_new_privs", user(5), map[string]string{"NoNewPrivs": "0"}, "no_new_privs"},
		{"seccomp", user(5), map[string]string{"Seccomp": "0"}, "seccomp"},
		{"more filters than the checkpoint", user(5), map[string]string{"Seccomp_filters": "2"}, "2 seccomp filters, the checkpoint has 1"},
		{"fewer filters than the checkpoint", user(5), map[string]string{"NSpid": "8", "Seccomp_filters": "1"}, "1 seccomp filters, the checkpoint has 2"},
		{"filters of a thread's own", user(5), map[string]string{"NSpid": "8", "Seccomp_filters": "2"}, ""},
		{"unknown process", user(5), map[string]string{"NStgid": "6"}, "1 seccomp filters, the checkpoint has 0"},
		{"permitted of root", user(0), map[string]string{"CapPrm": "c1"}, ""},
		{"permitted of a user", user(5), map[string]string{"CapPrm": "1"}, "CapPrm"},
		{"effective", user(0), map[string]string{"CapEff": "200000"}, "CapEff"},
		{"inheritable", user(0), map[string]string{"CapInh": "200000"}, "CapInh"},
		{"ambient", ambient, map[string]string{"CapAmb": "1"}, "CapAmb"},
		{"bounding", user(0), map[string]string{"CapBnd": "2000c1"}, "CapBnd"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, err := parseStatus(status(test.change))
			if err != nil {
				t.Fatal(err)
			}
			l := limitsOf(test.spec)
			l.filters = criuimages.Filters{5: 1, 8: 2}
			got := l.exceeded(s)
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("problem %q, want %q", got, test.want)
			}
		})
	}
}

// A status without one of the fields is refused, because the missing right might exceed the limits.
func TestParseStatusNeedsAllFields(t *testing.T) {
	for _, name := range []string{"State", "TracerPid", "Uid", "Gid", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "NSpid", "NStgid"} {
		if s, err := parseStatus(strings.Replace(status(nil), name+":", "X"+name+":", 1)); err == nil {
			t.Errorf("without %s: %+v", name, s)
		}
	}
	if s, err := readStatus("/proc/self/status"); err != nil || len(s.uids) != 4 || s.uids[0] != uint32(os.Getuid()) {
		t.Errorf("own status: %+v, %v", s, err)
	}
}

func TestRestoredLabel(t *testing.T) {
	for _, test := range []struct {
		content, label string
		good           bool
	}{
		{"berth-default (enforce)\n", "berth-default", true},
		{"unconfined\n", "berth-default", false},
		{"berth-default2 (enforce)\n", "berth-default", false},
		{"system_u:system_r:container_t:s0:c1,c2\x00", "system_u:system_r:container_t:s0:c1,c2", true},
		{"system_u:system_r:container_t:s0:c1,c3\x00", "system_u:system_r:container_t:s0:c1,c2", false},
		{"anything", "", true},
	} {
		t.Run(test.content, func(t *testing.T) {
			dir := t.TempDir()
			testutil.Must(t, os.Mkdir(dir+"/attr", 0o700))
			testutil.Must(t, os.WriteFile(dir+"/attr/current", []byte(test.content), 0o600))
			problem, err := (&limits{label: test.label}).otherLabel(dir)
			if (problem == "") != test.good || err != nil {
				t.Errorf("problem %q, %v", problem, err)
			}
		})
	}
	if _, err := (&limits{label: "a"}).otherLabel(t.TempDir()); err == nil {
		t.Error("a missing label is no error")
	}
}
