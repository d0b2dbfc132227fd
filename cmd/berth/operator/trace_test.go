package operator

import (
	"encoding/json"
	"encoding/xml"
	"io"
	"strings"
	"testing"
	"unicode"

	"berth/cmd/berth/client/fakecri"
	"berth/internal/testutil"
	"berth/internal/trace"
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

func TestTrace(t *testing.T) {
	c := newConsole(t, &fakecri.Server{PodInfo: map[string]string{"trace": traced}})
	c.detach("containers: [" + app("app") + "]")
	testutil.Golden(t, *updateGolden, "trace.txt", c.must("trace", "web"))

	parser := xml.NewDecoder(strings.NewReader(c.must("trace", "web", "--output", "svg")))
	var text strings.Builder
	for {
		token, err := parser.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if data, ok := token.(xml.CharData); ok {
			text.Write(data)
		}
	}
	for _, want := range []string{"default/web: 15.0 ms in berth", "RunPodSandbox", "bridge", "StartContainer <b>\ufffd[31mweb"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in the SVG's text:\n%s", want, text.String())
		}
	}

	var operations []trace.Operation
	if err := json.Unmarshal([]byte(c.must("trace", "default/web", "-o", "json")), &operations); err != nil || len(operations) != 2 || operations[1].Spans[1].Took != 2500000 {
		t.Errorf("%+v: %v", operations, err)
	}
}

// The output must be safe for a terminal and decode to the original data.
func TestTraceAsData(t *testing.T) {
	const hostile = "a\x1b[31m\u009b\u202e\U000e0001é\n"
	var out strings.Builder
	if err := printData(&out, []trace.Operation{{Object: hostile}}); err != nil {
		t.Fatal(err)
	}
	if i := strings.IndexFunc(out.String(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >= 0 {
		t.Errorf("printed: %q", out.String()[i:])
	}
	var back []trace.Operation
	if err := json.Unmarshal([]byte(out.String()), &back); err != nil || len(back) != 1 || back[0].Object != hostile {
		t.Errorf("it is %+v; %v", back, err)
	}
}

func TestTraceRefused(t *testing.T) {
	c := newConsole(t, &fakecri.Server{})
	c.detach("containers: [" + app("app") + "]")
	refused := func(want string, args ...string) {
		t.Helper()
		if stdout, stderr, code := c.do(append([]string{"trace"}, args...)...); code != 1 || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%q: %q, %q, %d", args, stdout, stderr, code)
		}
	}
	refused("too old", "web")
	c.PodInfo = map[string]string{"trace": "null"}
	refused("earlier daemon", "web")
	c.PodInfo = map[string]string{"trace": "{"}
	refused("unexpected end of JSON", "web")
	refused("want text, svg or json", "web", "-o", "table")
	refused("no pod", "unknown")
}
