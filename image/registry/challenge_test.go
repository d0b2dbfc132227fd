package registry

import (
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
)

func TestParseChallenges(t *testing.T) {
	type params = map[string]string
	for _, c := range []struct {
		headers []string
		want    []challenge
	}{
		{nil, nil},
		{[]string{`Basic realm="Registry"`}, []challenge{{"basic", params{"realm": "Registry"}}}},
		{[]string{`Bearer realm="https://auth/token",service="reg",scope="repository:a/b:pull,push"`},
			[]challenge{{"bearer", params{"realm": "https://auth/token", "service": "reg", "scope": "repository:a/b:pull,push"}}}},
		{[]string{`BEARER REALM = "a" , Service=plain`}, []challenge{{"bearer", params{"realm": "a", "service": "plain"}}}},
		{[]string{`Negotiate, Basic realm="x", Bearer realm="y"`},
			[]challenge{{"negotiate", params{}}, {"basic", params{"realm": "x"}}, {"bearer", params{"realm": "y"}}}},
		{[]string{`Basic realm="x"`, `Bearer realm="y"`}, []challenge{{"basic", params{"realm": "x"}}, {"bearer", params{"realm": "y"}}}},
		{[]string{`Bearer realm="a \"quoted\" \\ one", x=""`}, []challenge{{"bearer", params{"realm": `a "quoted" \ one`, "x": ""}}}},
		{[]string{`Bearer realm="unterminated`}, []challenge{{"bearer", params{"realm": "unterminated"}}}},
		{[]string{`"garbage"`, ``, `,,`}, nil},
	} {
		got := parseChallenges(http.Header{"Www-Authenticate": c.headers})
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q:\n got %v\nwant %v", c.headers, got, c.want)
		}
	}
}

func FuzzParseChallenges(f *testing.F) {
	f.Add(`Bearer realm="https://auth/token",service="reg",scope="repository:a/b:pull"`)
	f.Add(`Negotiate, Basic realm="x\`)
	f.Add(`a=b=c, ="`)
	f.Fuzz(func(t *testing.T, s string) {
		for _, c := range parseChallenges(http.Header{"Www-Authenticate": {s}}) {
			if c.Scheme == "" || c.Params == nil {
				t.Fatalf("%q: %+v", s, c)
			}
		}
	})
}

// FuzzChallenge: a challenge written by the rules of RFC 7235 is parsed the same, between any other
// text.
func FuzzChallenge(f *testing.F) {
	f.Add("Bearer", "realm", `https://a/b?c="d\e`, "Basic realm=x")
	f.Add("a!", "B", "", `="`)
	f.Fuzz(func(t *testing.T, scheme, name, value, more string) {
		isToken := func(s string) bool { tok, rest := token(s); return tok != "" && rest == "" }
		if !isToken(scheme) || !isToken(name) {
			t.Skip("no scheme")
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(value) + `"`
		header := http.Header{"Www-Authenticate": {more, fmt.Sprintf("%s %s=%s , %s", scheme, name, quoted, more)}}
		for _, c := range parseChallenges(header) {
			if c.Scheme == strings.ToLower(scheme) && c.Params[strings.ToLower(name)] == value {
				return
			}
			if c.Scheme != strings.ToLower(c.Scheme) || c.Scheme == "" {
				t.Fatalf("scheme %q", c.Scheme)
			}
		}
		// If a later parameter has the same name, the later one counts.
		if again := parseChallenges(http.Header{"Www-Authenticate": {fmt.Sprintf("%s %s=%s", scheme, name, quoted)}}); len(again) != 1 ||
			again[0].Params[strings.ToLower(name)] != value {
			t.Fatalf("%q: %+v", header, again)
		}
	})
}
