package operator

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"berth/cmd/berth/client/clienttest"
	"berth/internal/testutil"
	"berth/internal/trace"
	"berth/sandbox/history"
)

// traced is a daemon's trace of a pod whose container has a hostile name and failed after two
// seconds.
const traced = `[
{"began":"2026-11-22T10:00:00Z","monotonic":1000000000,"spans":[
 {"name":"RunPodSandbox","depth":0,"from":0,"took":12000000},
 {"name":"plan","depth":1,"from":100000,"took":900000},
 {"name":"CNI ADD","depth":1,"from":1000000,"took":10000000},
 {"name":"bridge","depth":2,"from":1200000,"took":8000000}]},
{"object":"<b>\u001b[31mweb","began":"2026-11-22T10:00:02Z","monotonic":3012000000,"failure":"no such file","spans":[
 {"name":"StartContainer","depth":0,"from":0,"took":3000000},
 {"name":"launcher","depth":1,"from":500000,"took":2500000,"open":true}]}
]`

// keptStarts are the starts that a daemon keeps: the one in traced for each present pod, and older
// ones.
type keptStarts struct {
	older []history.Summary
	trace string
}

func (k *keptStarts) Starts() []history.Summary { return k.older }

func (k *keptStarts) Start(id string) (s history.Start, err error) {
	s.Pod = history.Pod{ID: id, Namespace: "default", Name: "web"}
	for _, o := range k.older {
		if o.ID == id {
			s.Pod = o.Pod
		}
	}
	return s, json.Unmarshal([]byte(k.trace), &s.Operations)
}

func keptStart(id, name string, age, took, pull time.Duration, failed bool) history.Summary {
	return history.Summary{
		Pod:   history.Pod{ID: strings.Repeat(id, 64), Namespace: "shop", Name: name},
		Began: time.Now().Add(-age), Took: took, Pull: pull, Containers: 1, Failed: failed,
	}
}

func TestTrace(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Kept: &keptStarts{trace: traced}})
	c.detach("containers: [" + app("app") + "]")
	testutil.Golden(t, *updateGolden, "trace.txt", c.must("trace", "web"))

	var operations []trace.Operation
	if err := json.Unmarshal([]byte(c.must("trace", "default/web", "-o", "json")), &operations); err != nil || len(operations) != 2 || operations[1].Spans[1].Took != 2500000 {
		t.Errorf("%+v: %v", operations, err)
	}
}

// Starts of removed pods are found by their names and IDs. The newest of several counts.
func TestTraceOfRemovedPod(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Kept: &keptStarts{trace: traced, older: []history.Summary{
		keptStart("a", "gone", time.Minute, time.Second, 0, false),
		keptStart("b", "gone", time.Hour, time.Second, 0, false),
	}}})
	for _, ref := range []string{"gone", "shop/gone", "aaaa", "bbbb"} {
		if out := c.must("trace", ref); !strings.Contains(out, "shop/gone: 15.0 ms in berth") {
			t.Errorf("%s:\n%s", ref, out)
		}
	}
}

func TestTraceLists(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Kept: &keptStarts{older: []history.Summary{
		keptStart("a", "fast", time.Minute, 20*time.Millisecond, 0, false),
		keptStart("b", "slow", time.Hour, 3*time.Second, 2*time.Second, true),
		keptStart("c", "middle", 50*time.Hour, time.Second, 0, false),
	}}})
	testutil.Golden(t, *updateGolden, "trace-list.txt", c.must("trace"))
	testutil.Golden(t, *updateGolden, "trace-slowest.txt", c.must("trace", "--slowest=2"))
	for args, want := range map[string]int{"trace -o json": 3, "trace --slowest 1 -o json": 1, "trace --slowest -o json": 3} {
		var all []history.Summary
		if err := json.Unmarshal([]byte(c.must(strings.Fields(args)...)), &all); err != nil || len(all) != want {
			t.Errorf("%s: %d starts, want %d; %v", args, len(all), want, err)
		}
	}
}

func TestTraceRefused(t *testing.T) {
	c := newConsole(t, &clienttest.Server{})
	c.detach("containers: [" + app("app") + "]")
	for _, tt := range []struct{ args, want string }{
		{"web", "trace web: the runtime on this socket is not berth"},
		{"", "the runtime on this socket is not berth"},
		{"web -o table", "want text or json"},
		{"--slowest=0", "a number above 0"},
		{"--slowest web", "leave the pod out"},
		{"web other", "unexpected argument"},
	} {
		if stdout, stderr, code := c.do(append([]string{"trace"}, strings.Fields(tt.args)...)...); code != 1 || stdout != "" ||
			!strings.Contains(stderr, tt.want) {
			t.Errorf("%s: %q, %q, %d", tt.args, stdout, stderr, code)
		}
	}
	c = newConsole(t, &clienttest.Server{Kept: &keptStarts{}})
	if _, stderr, code := c.do("trace", "unknown"); code != 1 || !strings.Contains(stderr, `no pod "unknown"`) {
		t.Errorf("%q, %d", stderr, code)
	}
}
