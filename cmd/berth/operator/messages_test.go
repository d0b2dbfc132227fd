package operator

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client/clienttest"
	"berth/cmd/berth/podrun"
)

// What people read after a mistake names the object, the reason and what to do.
func TestMessages(t *testing.T) {
	full := strings.Repeat("ab12", 16)
	pod := "containers: [" + app("c") + "]"
	ended := "restartPolicy: Never, containers: [" + app("c") + "]"
	for _, tt := range []struct {
		name  string
		spec  string // of pod web, which the runtime has; empty: none
		exits []int32
		fail  map[string]error // errors of calls, by the begin of the call
		stdin string
		args  string
		want  string
	}{
		{"exec in an exited container", ended, []int32{137}, nil, "", "exec web/c true",
			"container web/c is not running (exited 137)"},
		{"no argument", "", nil, nil, "", "rm", "name a container or pod: berth rm NAME…"},
		{"removal of a running container", pod, nil, nil, "", "rm web/c",
			"container web/c is running; stop it with crictl, or use --force"},
		{"removal of a running pod", pod, nil, nil, "", "rm web",
			"pod default/web is running; stop it with crictl, or use --force"},
		{"scheduling fields", "", nil, nil, manifestOf("p2", "nodeSelector: {a: b}, "+pod), "run -d -",
			"-: refused: spec.nodeSelector: needs a kubelet: see docs/standalone.md"},
		{"a hash", pod, nil, map[string]error{"StopContainer c": status.Error(codes.Internal, "container "+full+" does not exist")},
			"", "rm -f web", "container ab12ab12ab12 does not exist"},
		{"a malformed quantity", "", nil, nil, manifestOf("p2", "containers: [{name: c, image: '"+testImage+
			"', resources: {limits: {memory: 64Mb}}}]"), "run -d -",
			"a quantity, such as memory, is malformed; write for example 500m, 2 or 64Mi"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := newConsole(t, &clienttest.Server{
				Programs: map[string]clienttest.Program{"c": {Exits: tt.exits}},
				Hook: func(_ context.Context, call string) error {
					for begin, err := range tt.fail {
						if strings.HasPrefix(call, begin) {
							return err
						}
					}
					return nil
				},
			})
			if tt.spec != "" {
				c.detach(tt.spec)
			}
			c.stdin = tt.stdin
			args := strings.Fields(tt.args)
			if args[0] == "run" {
				args = append(args, "--run-dir", c.runDir)
			}
			_, stderr, _ := c.do(args...)
			if !strings.Contains(stderr, tt.want) || strings.Contains(stderr, full) {
				t.Errorf("berth %s:\n%s\nwant %s", tt.args, stderr, tt.want)
			}
		})
	}
}

func manifestOf(name, spec string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + "}\nspec: {" + spec + "}\n"
}

// Ctrl-C during a run says how long the stop may take.
func TestStopIsAnnounced(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	said := make(chan string, 1)
	config := &podrun.Config{Report: func(format string, args ...any) { said <- fmt.Sprintf(format, args...) }}
	announceStop(ctx, config, 20*time.Second)
	cancel(&cli.Interrupted{Signal: syscall.SIGINT})
	if got := <-said; got != "stopping, up to 20 s; Ctrl-C again kills" {
		t.Error(got)
	}
}
