package harness

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// LogLine is a line of the daemon's log: values by key.
type LogLine map[string]string

func (l LogLine) String() string {
	return l["time"] + " " + l["level"] + " " + l["msg"] + " " + fmt.Sprint(map[string]string(l))
}

// LogLines returns the daemon's log. It fails the test unless each line has slog's text form with
// time, level and msg.
func (d *Daemon) LogLines(t *testing.T) (lines []LogLine) {
	t.Helper()
	for text := range strings.Lines(string(Get(os.ReadFile(d.LogFile()))(t))) {
		line, err := parseLogLine(strings.TrimSuffix(text, "\n"))
		if err != nil {
			t.Errorf("invalid log line %q: %v", text, err)
			continue
		}
		lines = append(lines, line)
	}
	return lines
}

func parseLogLine(text string) (LogLine, error) {
	line := LogLine{}
	for text != "" {
		key, rest, ok := strings.Cut(text, "=")
		if !ok || key == "" || strings.ContainsAny(key, " \"") {
			return nil, fmt.Errorf("no key at %q", text)
		}
		value, after, _ := strings.Cut(rest, " ")
		if strings.HasPrefix(rest, `"`) {
			quoted, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return nil, err
			}
			if value, err = strconv.Unquote(quoted); err != nil {
				return nil, err
			}
			after = strings.TrimPrefix(rest[len(quoted):], " ")
		}
		if _, twice := line[key]; twice {
			return nil, fmt.Errorf("duplicate key %s", key)
		}
		line[key], text = value, after
	}
	for _, key := range []string{"time", "level", "msg"} {
		if line[key] == "" {
			return nil, fmt.Errorf("no %s", key)
		}
	}
	return line, nil
}

// ofMachine contains the beginnings of warnings about the machine on which the tests run.
var ofMachine = []string{"the kernel refuses to lower oom_score_adj", "berth-unpack may", "CNI configuration directory cannot be watched", "pods cannot have user namespaces"}

// QuietLog fails the test for each warning and error in the daemon's log, except warnings about
// this machine.
func (d *Daemon) QuietLog(t *testing.T) {
	t.Helper()
	for _, line := range d.LogLines(t) {
		known := slices.ContainsFunc(ofMachine, func(begin string) bool { return strings.HasPrefix(line["msg"], begin) })
		if (line["level"] == "WARN" || line["level"] == "ERROR") && !known {
			t.Errorf("the daemon warns: %s", line)
		}
	}
}
