package registry

import (
	"net/http"
	"strings"
	"testing"

	"berth/image/registry/registrytest"
)

// wantSteps checks the results of a host's steps.
func wantSteps(t *testing.T, got []Probe, want ...string) {
	t.Helper()
	var steps []string
	for _, p := range got {
		step := p.Step
		if !p.OK {
			step += " fails"
		}
		steps = append(steps, step)
	}
	if strings.Join(steps, ", ") != strings.Join(want, ", ") {
		t.Errorf("got %+v", got)
	}
}

func TestDiagnose(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	putImage(reg, "team/app", "v1", []byte("a layer"))
	c := newClient(t, Config{})
	ref := Reference{Domain: reg.Host(), Repository: "team/app", Tag: "v1"}
	wantSteps(t, c.Diagnose(t.Context(), ref, true), "dns", "tcp", "tls", "auth", "manifest", "ranges", "speed")
	wantSteps(t, c.Diagnose(t.Context(), ref, false), "dns", "tcp", "tls", "auth")
	ref.Tag = "missing"
	wantSteps(t, c.Diagnose(t.Context(), ref, true), "dns", "tcp", "tls", "auth", "manifest fails")
	reg.Close()
	wantSteps(t, c.Diagnose(t.Context(), ref, true), "dns", "tcp fails")
}

func TestDiagnoseTLSAndAuthentication(t *testing.T) {
	t.Parallel()
	reg := registrytest.NewTLS(t)
	reg.Before = func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("WWW-Authenticate", `Bearer realm="https://token.example/t"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}
	ref := Reference{Domain: "r.example", Repository: "app", Tag: "v1"}
	bad := newClient(t, Config{Sources: Sources{Dirs: []string{hostsDir(t, "r.example", "server = \""+reg.URL+"\"\n")}}})
	wantSteps(t, bad.Diagnose(t.Context(), ref, false), "dns", "tcp", "tls fails")
	good := newClient(t, Config{Sources: Sources{Dirs: []string{hostsDir(t, "r.example", "server = \""+reg.URL+"\"\nskip_verify = true\n")}}})
	got := good.Diagnose(t.Context(), ref, false)
	wantSteps(t, got, "dns", "tcp", "tls", "auth")
	if last := got[len(got)-1].Found; last != "token of token.example; no credentials configured" {
		t.Errorf("authentication: %s", last)
	}
}
