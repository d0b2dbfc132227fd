package crash

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
)

// execSession runs a command in a session.
func execSession(t *testing.T, w *world) error {
	t.Helper()
	r, err := w.d.Cri.Exec(t.Context(), &runtimeapi.ExecRequest{ContainerId: w.id, Cmd: []string{"echo", "done"}, Stdout: true})
	if err != nil {
		return err
	}
	var out sessions.Screen
	_, err = sessions.Spdy.Stream(t.Context(), sessions.Plain(), r.Url, remotecommand.StreamOptions{Stdout: &out})
	if err == nil && out.String() != "done\n" {
		err = fmt.Errorf("it printed %q", out.String())
	}
	awaitSessionsEnd(t)
	return err
}

// attachSession attaches to a container until shortly after the end of the client's input.
func attachSession(t *testing.T, w *world) error {
	t.Helper()
	r, err := w.d.Cri.Attach(t.Context(), &runtimeapi.AttachRequest{ContainerId: w.id, Stdin: true, Stdout: true})
	if err != nil {
		return err
	}
	var out sessions.Screen
	_, err = sessions.Spdy.Stream(t.Context(), sessions.Plain(), r.Url, remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: &out})
	awaitSessionsEnd(t)
	return err
}

// awaitSessionsEnd waits for the end of the process of sessions. It waits one minute for the client
// of a URL that a killed daemon has made.
func awaitSessionsEnd(t *testing.T) {
	t.Helper()
	harness.Must(t, harness.WaitUpTo(90*time.Second, func() error {
		if len(machine.ProcessesOf("berth-stream")) > 0 {
			return errors.New("the process of sessions runs")
		}
		return nil
	}))
}
