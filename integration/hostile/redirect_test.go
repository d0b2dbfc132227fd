package hostile

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/integration/harness"
)

// public is a documentation address (RFC 5737), which berth treats as another machine's.
const public = "192.0.2.7"

// startPublic starts a registry at the public address.
func startPublic(t *testing.T) *registrytest.Server {
	t.Helper()
	return registrytest.Start(t, func(s *httptest.Server) {
		s.Listener.Close()
		s.Listener = harness.Get(net.Listen("tcp", public+":0"))(t)
		s.Start()
	})
}

// A remote registry redirects berth to this machine, to link-local addresses and to the cloud's
// metadata service. It does so for each kind of request, by a second redirect, by a name, and as
// its token server. None of these addresses receives a request, except those that hosts.toml
// allows.
func TestRedirectsToThisMachine(t *testing.T) {
	out, err := exec.Command("ip", "addr", "add", public+"/32", "dev", "lo").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("ip", "addr", "del", public+"/32", "dev", "lo").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	layer := incompressible(t)
	var asked atomic.Int64
	victim := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_, _ = w.Write(layer.Blob)
	}))
	defer victim.Close()
	_, port, err := net.SplitHostPort(victim.Listener.Addr().String())
	harness.Must(t, err)

	var hosts []harness.DaemonOption
	plainHTTP := func(r *registrytest.Server, more string) {
		hosts = append(hosts, harness.WithHosts(r.Host(), fmt.Sprintf("server = %q\n%s", r.URL, more)))
	}
	redirect := func(to string) func(http.ResponseWriter, *http.Request) bool {
		return status(http.StatusTemporaryRedirect, "Location", to)
	}
	here := "http://127.0.0.1:" + port + "/?secret=hunter2"
	twice := startPublic(t)
	twice.Before = redirect(here)
	blob := digest.FromBytes(layer.Blob).Encoded()
	var attempts []attempt
	for what, c := range map[string]struct {
		before func(http.ResponseWriter, *http.Request) bool
		text   string
	}{
		"a manifest":              {on("/manifests/", redirect(here)), "127.0.0.1"},
		"a config":                {on("/blobs/", redirect(here)), "127.0.0.1"},
		"a layer":                 {on(blob, redirect(here)), "127.0.0.1"},
		"by a name":               {on(blob, redirect("http://localhost:"+port+"/")), "127.0.0.1"},
		"the unspecified address": {on(blob, redirect("http://0.0.0.0:"+port+"/")), "0.0.0.0"},
		"in IPv6's words":         {on(blob, redirect("http://[::ffff:127.0.0.1]:"+port+"/")), "127.0.0.1"},
		"by a second redirect":    {on(blob, redirect(twice.URL+"/v2/x")), "127.0.0.1"},
		"a link-local address":    {on(blob, redirect("http://169.254.1.1/")), "link-local"},
		"metadata":                {on(blob, redirect("http://169.254.169.254/latest/meta-data/")), "metadata service"},
		"for a token":             {on("", status(http.StatusUnauthorized, "WWW-Authenticate", `Bearer realm="`+here+`"`)), "127.0.0.1"},
		"for a token, metadata":   {on("", status(http.StatusUnauthorized, "WWW-Authenticate", `Bearer realm="http://169.254.169.254/token"`)), "metadata service"},
	} {
		r := startPublic(t)
		r.PutImage("hostile", "v1", what, layer)
		plainHTTP(r, "")
		r.Before = c.before
		attempts = append(attempts, attempt{what: what, name: r.Host() + "/hostile:v1", code: codes.FailedPrecondition, text: c.text})
	}
	allowed := startPublic(t)
	allowed.PutImage("hostile", "v1", "allowed", layer)
	plainHTTP(allowed, `redirect_to = ["127.0.0.0/8"]`)
	allowed.Before = on(blob, redirect(here))

	d := startDaemonWith(t, nil, hosts...)
	allRefused(t, d, attempts)
	harness.Equal(t, "requests to this machine", asked.Load(), 0)
	log := harness.Get(os.ReadFile(d.LogFile()))(t)
	harness.WantNoText(t, "log", string(log), "hunter2")

	name := allowed.Host() + "/hostile:v1"
	harness.Must(t, pull(t, d, name, nil))
	harness.Equal(t, "requests to this machine, allowed", asked.Load(), 1)
	harness.Must(t, d.Images.RemoveImage(t.Context(), imageSpec(name)))
}
