package test

import (
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"berth/shim/proto"
)

// exitStatus returns the exit status that the monitor parses from the output of `runsc wait`.
func exitStatus(t *testing.T, text []byte) (code int, ok bool) {
	t.Helper()
	return number(t, ask(t, 'x', text))
}

func number(t *testing.T, answer []byte) (n int, ok bool) {
	t.Helper()
	if len(answer) == 0 {
		return 0, false
	}
	n, err := strconv.Atoi(string(answer))
	if err != nil {
		t.Fatal(err)
	}
	return n, true
}

func TestExitStatus(t *testing.T) {
	for text, want := range map[string]int{
		`{"id":"c","exitStatus":0}` + "\n":       0,
		`{"id":"c", "exitStatus" : 137 , "x":1}`: 137,
		`{"exitStatus":255}`:                     255,
	} {
		if got, ok := exitStatus(t, []byte(text)); got != want || !ok {
			t.Errorf("%s: %d, %v", text, got, ok)
		}
	}
	for _, text := range []string{
		"", `{"id":"c"}`, `{"exitStatus":}`, `{"exitStatus":-1}`, `{"exitStatus":256}`, `{"exitStatus":99999999999999999999}`,
		`{"exitStatus":"3"}`, `{"exitStatus":3`, `"exitStatus"`, `{"exitStatus"`, `{"exitStatus" 3}`,
	} {
		if got, ok := exitStatus(t, []byte(text)); ok {
			t.Errorf("%s: %d", text, got)
		}
	}
}

// FuzzExitStatus checks that the monitor parses the output of a JSON encoder and never returns an
// impossible exit code.
func FuzzExitStatus(f *testing.F) {
	f.Add([]byte(`{"id":"c","exitStatus":137}`), "c", uint8(137))
	f.Add([]byte(`{"exitStatus":300,"exitStatus":-1}`), `"exitStatus":1}`, uint8(0))
	f.Fuzz(func(t *testing.T, text []byte, id string, code uint8) {
		if got, ok := exitStatus(t, text); ok && (got < 0 || got > 255) {
			t.Errorf("%q: %d", text, got)
		}
		said, err := json.Marshal(map[string]any{"id": id, "exitStatus": code})
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := exitStatus(t, said); !ok || got != int(code) {
			t.Errorf("%s: %d, %t", said, got, ok)
		}
	})
}

// zombieStatus returns the exit status that the monitor parses from a /proc/PID/stat.
func zombieStatus(t *testing.T, stat string) (status int, ok bool) {
	t.Helper()
	return number(t, ask(t, 'z', []byte(stat)))
}

// statLine is a /proc/PID/stat with a name, a state and field 52.
func statLine(name, state, status string) string {
	return "7 (" + name + ") " + state + strings.Repeat(" -1", 52-4) + " " + status
}

// The status of an ended process is found whatever its name is, and only in a complete text of the
// kernel.
func TestZombieStatus(t *testing.T) {
	for name, c := range map[string]struct {
		stat string
		want int // -1: none
	}{
		"exited":               {statLine("sh", "Z", "1792\n"), 7 << 8},
		"killed":               {statLine("sh", "Z", "9\n"), 9},
		"core dumped":          {statLine("sh", "Z", "139\n"), 139},
		"well":                 {statLine("sh", "Z", "0\n"), 0},
		"later fields":         {statLine("sh", "Z", "256 3 4\n"), 256},
		"a name like a stat":   {statLine(statLine("x", "Z", "9"), "Z", "256\n"), 256},
		"a name of brackets":   {statLine(") Z )(", "Z", "256\n"), 256},
		"a name with a line":   {statLine("a\nb", "Z", "256\n"), 256},
		"runs":                 {statLine("sh", "S", "256\n"), -1},
		"state of two letters": {statLine("sh", "ZZ", "256\n"), -1},
		"no end":               {statLine("sh", "Z", "256"), -1},
		"no status":            {statLine("sh", "Z", "\n"), -1},
		"too large":            {statLine("sh", "Z", "65536\n"), -1},
		"negative":             {statLine("sh", "Z", "-1\n"), -1},
		"no number":            {statLine("sh", "Z", "x\n"), -1},
		"a field is missing":   {"7 (sh) Z" + strings.Repeat(" 1", 52-4) + "\n", -1},
		"no name":              {" Z" + strings.Repeat(" 1", 52-3) + "\n", -1},
		"only a name":          {"7 (sh)", -1},
		"nothing":              {"", -1},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := zombieStatus(t, c.stat)
			if ok != (c.want >= 0) || ok && got != c.want {
				t.Errorf("%d, %t; want %d", got, ok, c.want)
			}
		})
	}
}

// FuzzZombieStatus: the parsed status is one that wait4 can return, and does not depend on the
// name.
func FuzzZombieStatus(f *testing.F) {
	f.Add("sh", "7 (sh) Z 1", uint16(9))
	f.Add("a) Z 1 2 3", statLine("sh", "Z", "70000\n"), uint16(7<<8))
	f.Fuzz(func(t *testing.T, name, stat string, status uint16) {
		if got, ok := zombieStatus(t, stat); ok && (got < 0 || got > math.MaxUint16) {
			t.Errorf("%q: %d", stat, got)
		}
		if got, ok := zombieStatus(t, statLine(name, "Z", strconv.Itoa(int(status))+"\n")); got != int(status) || !ok {
			t.Errorf("%q: %d, %t, want %d", name, got, ok, status)
		}
	})
}

func TestOOMKills(t *testing.T) {
	for _, tt := range []struct{ data, want string }{
		{"low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n", "2"}, // v2
		{"oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", "7"},                // v1
		{"oom_kill_disable 0\nunder_oom 0\n", ""},                             // v1 before Linux 4.13
		{"oom_kill 18446744073709551615\n", "18446744073709551615"},
		{"oom_kill 18446744073709551616\n", ""},
		{"oom_kill x\n", ""},
		{"oom_kill ", ""},
		{"", ""},
	} {
		if got := string(ask(t, 'o', []byte(tt.data))); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.data, got, tt.want)
		}
	}
}

// FuzzOOMKills: the C parser finds the same number as a parser in Go.
func FuzzOOMKills(f *testing.F) {
	f.Add("oom 3\noom_kill 2\n")
	f.Add("oom_kill \t9 \r\noom_kill 3")
	f.Fuzz(func(t *testing.T, data string) {
		want := ""
		for line := range strings.Lines(data) {
			if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
				if kills, err := strconv.ParseUint(strings.Trim(n, " \t\n\v\f\r"), 10, 64); err == nil {
					want = strconv.FormatUint(kills, 10)
				}
				break
			}
		}
		if got := string(ask(t, 'o', []byte(data))); got != want {
			t.Errorf("%q: %q, want %q", data, got, want)
		}
	})
}

// The record is what its reader's own encoder makes, checksum included.
func TestExitRecord(t *testing.T) {
	for _, e := range []proto.Exit{
		{At: time.Unix(0, 0)},
		{Code: 137, Signal: 9, OOMKilled: true, At: time.Unix(0, 1_790_000_000_123_456_789)},
		{Code: 255, At: time.Unix(0, math.MaxInt64)},
		{Code: -1, Signal: math.MaxInt32, At: time.Unix(0, math.MinInt64)},
	} {
		got := ask(t, 'r', e.Code, int32(e.Signal), uint32(map[bool]int{true: 1}[e.OOMKilled]), e.At.UnixNano())
		if string(got) != string(e.Encode()) {
			t.Errorf("%+v: %q, want %q", e, got, e.Encode())
		}
	}
}

// params returns the parameters that the monitor parses from a command line, one per line, or
// nothing if it refuses them.
func params(t *testing.T, args []string) string {
	t.Helper()
	return string(ask(t, 'p', []byte(strings.Join(args, "\x00")+"\x00")))
}

// valuesOf are the values of a command line that the monitor accepts.
func valuesOf(args []string) string {
	var values strings.Builder
	for _, arg := range args {
		_, value, _ := strings.Cut(arg, "=")
		values.WriteString(value + "\n")
	}
	return values.String()
}

func TestParams(t *testing.T) {
	for _, p := range []proto.MonitorParams{
		{},
		{ID: "a", Dir: "/run/berth/c/a", LogDir: "/var/log", LogPath: "/var/log/with space=and equals/0.log", MaxLine: 16384, InitPID: 77,
			StdinOnce: true, Orphans: true, Init: 9, KillDir: "/sys/fs/cgroup/x", Listen: 3, Log: 4, Stdin: 5, Stdout: 6, Stderr: 7, Console: -1,
			Verdict: -1, OOM: 8, OOMNotify: -1, OOMParent: 11, Gate: 12},
	} {
		if got, want := params(t, p.Args()), valuesOf(p.Args()); got != want {
			t.Errorf("%q is taken for %q", p.Args(), got)
		}
	}
}

func TestParamsRefused(t *testing.T) {
	good := (&proto.MonitorParams{}).Args()
	for i := range good {
		if got := params(t, slices.Delete(slices.Clone(good), i, i+1)); got != "" {
			t.Errorf("without %q: %q", good[i], got)
		}
	}
	if got := params(t, append(slices.Clone(good), "more=1")); got != "" {
		t.Errorf("with one more: %q", got)
	}
	for i, arg := range good {
		name, _, _ := strings.Cut(arg, "=")
		for _, bad := range []string{name, "x" + arg, "=", ""} {
			args := slices.Clone(good)
			args[i] = bad
			if got := params(t, args); got != "" {
				t.Errorf("with %q for %q: %q", bad, arg, got)
			}
		}
	}
	for name, values := range map[string][]string{
		"init": {"", "x", "1x", "2147483648", "99999999999999999999", "--1", "+1", " 1"}, "stdin-once": {"", "perhaps", "1", "True"}, "listen-fd": {"", "-"},
	} {
		i := slices.IndexFunc(good, func(arg string) bool { return strings.HasPrefix(arg, name+"=") })
		for _, value := range values {
			args := slices.Clone(good)
			args[i] = name + "=" + value
			if got := params(t, args); got != "" {
				t.Errorf("with %q: %q", args[i], got)
			}
		}
	}
}
