package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Difference is one difference that `berth check --state` reports.
type Difference struct {
	Invariant, Object, Expected, Found string
}

// Text returns the difference in one line.
func (d Difference) Text() string {
	if d.Expected == "" {
		return d.Invariant + ": " + d.Object + ": " + d.Found
	}
	return d.Invariant + ": " + d.Object + ": expected " + d.Expected + ", found " + d.Found
}

// StateInFile sets the state directory in the configuration file, because the flag --state of
// `berth check` has another meaning.
func StateInFile(_ *testing.T, d *Daemon) {
	d.Extra = append(d.Extra, fmt.Sprintf("state = %q", d.State))
}

// StateCheck runs `berth check --state` and returns the differences that it reports. It fails the
// test if the check skipped something or examined another daemon.
func (d *Daemon) StateCheck(t *testing.T, args ...string) []Difference {
	t.Helper()
	cmd := d.Command(append([]string{"check", "--state=" + d.State, "--json", "--config", d.ConfigFile(), "--listen", d.Socket,
		"--root", d.Root, "--cni-conf-dir", d.ConfDir}, args...)...)
	startBy(t, cmd, d.enter)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var report struct {
		Differences []Difference
		Skipped     []string
		Daemon      int
	}
	if e := json.Unmarshal(out, &report); e != nil {
		t.Fatalf("check --state: %v, %v: %s%s", err, e, out, &stderr)
	}
	if (err != nil) != (len(report.Differences) > 0) {
		t.Errorf("check --state: %v with %d differences", err, len(report.Differences))
	}
	left := slices.DeleteFunc(report.Skipped, func(s string) bool { return strings.HasPrefix(s, "bytes: ") }) // checked only on request
	if !d.Gone() {
		Equal(t, "daemon that check --state has examined", report.Daemon, d.Cmd.Process.Pid)
		Equal(t, "skipped checks of check --state", strings.Join(left, "; "), "")
	}
	return report.Differences
}

// StateMatches fails the test if berth's records differ from the machine. A test that causes a
// difference on purpose calls Daemon.Tolerate.
func (d *Daemon) StateMatches(t *testing.T) {
	t.Helper()
	for _, text := range d.mismatches(t) {
		t.Error(text)
	}
}

// StateSettles is StateMatches with retries, for the end of a test. The daemon itself retries
// writes and removals that failed, for example on a full disk.
func (d *Daemon) StateSettles(t *testing.T) {
	t.Helper()
	var found []string
	_ = WaitUpTo(leakPatience, func() error {
		if found = d.mismatches(t); len(found) > 0 {
			return fmt.Errorf("%d differences", len(found))
		}
		return nil
	})
	for _, text := range found {
		t.Error(text)
	}
}

// mismatches returns the differences that are not tolerated.
func (d *Daemon) mismatches(t *testing.T) (texts []string) {
	t.Helper()
	for _, found := range d.StateCheck(t) {
		if !d.tolerates(found) {
			texts = append(texts, found.Text())
		}
	}
	return texts
}

// Tolerate makes StateMatches ignore differences whose text contains part.
func (d *Daemon) Tolerate(part string) { d.tolerated = append(d.tolerated, part) }

func (d *Daemon) tolerates(found Difference) bool {
	for _, part := range d.tolerated {
		if strings.Contains(found.Text(), part) {
			return true
		}
	}
	return false
}
