package pull

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image/profile"
	"berth/image/registry/registrytest"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

const seccompJSON = `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW"}]}`

// openForProfiles opens a Puller that parses profiles in this process.
func openForProfiles(t *testing.T, root string) *Puller {
	t.Helper()
	testutil.NeedRoot(t) // the store has layers with owners
	parse := func(_ context.Context, _ string, data []byte) ([]byte, error) { return profile.Parse(data) }
	p, err := Open(t.Context(), Config{Root: root, Unpack: unpack.Layer, Profile: parse}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// A pulled profile is there after a restart, and the next pull works although the registry is gone.
func TestPullProfile(t *testing.T) {
	reg := registrytest.New(t)
	top := reg.PutArtifact("profile", "v1", profile.MediaType, registrytest.File{Content: []byte(seccompJSON)})
	ref := reg.Host() + "/profile@" + top.Digest.String()
	root := t.TempDir()
	p := openForProfiles(t, root)
	if cached, err := p.PullProfile(t.Context(), "", ref, nil); err != nil || cached {
		t.Fatalf("first pull: cached %t, %v", cached, err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	reg.Close()
	p = openForProfiles(t, root)
	if cached, err := p.PullProfile(t.Context(), "", ref, nil); err != nil || !cached {
		t.Fatalf("second pull: cached %t, %v", cached, err)
	}
	list := p.Profiles().List()
	if len(list) != 1 || len(list[0].Refs) != 1 || list[0].Refs[0] != ref {
		t.Fatalf("profiles %+v", list)
	}
	if images := p.Store().List(); len(images) != 0 {
		t.Errorf("images %v", images)
	}
	other := reg.Host() + "/other@" + top.Digest.String()
	_, err := p.PullProfile(t.Context(), "", other, nil)
	if err == nil || !strings.HasPrefix(err.Error(), crierrors.ErrRegistryUnavailable.Error()+": ") {
		t.Errorf("pull from a registry that is gone: %v", err)
	}
}

// Permanent refusals begin with SecurityProfileInvalid. A missing manifest is NotFound, and the
// kubelet tries again.
func TestPullProfileRefuses(t *testing.T) {
	reg := registrytest.New(t)
	put := func(repo, kind, content string) string {
		top := reg.PutArtifact(repo, "v1", kind, registrytest.File{Content: []byte(content)})
		return reg.Host() + "/" + repo + "@" + top.Digest.String()
	}
	p := openForProfiles(t, t.TempDir())
	for name, ref := range map[string]string{
		"tag":        strings.Split(put("a", profile.MediaType, seccompJSON), "@")[0] + ":v1",
		"short name": "busybox@sha256:" + strings.Repeat("0", 64),
		"no path":    "docker.io/busybox@sha256:" + strings.Repeat("0", 64),
		"tag too":    reg.Host() + "/a:v1@sha256:" + strings.Repeat("0", 64),
		"no name":    "@",
		"other type": put("b", "application/vnd.example", seccompJSON),
		"notify":     put("c", profile.MediaType, `{"defaultAction":"SCMP_ACT_NOTIFY"}`),
	} {
		_, err := p.PullProfile(t.Context(), "", ref, nil)
		if err == nil || !strings.HasPrefix(err.Error(), crierrors.ErrSecurityProfileInvalid.Error()+": ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := p.PullProfile(t.Context(), "", reg.Host()+"/a@sha256:"+strings.Repeat("0", 64), nil)
	if !errdefs.IsNotFound(err) || strings.Contains(err.Error(), "SecurityProfileInvalid") {
		t.Errorf("missing manifest: %v", err)
	}
	big := reg.PutManifest("a", "big", "", []byte(strings.Repeat(" ", profile.MaxManifest+1)))
	_, err = p.PullProfile(t.Context(), "", reg.Host()+"/a@"+big.Digest.String(), nil)
	if err == nil || !strings.Contains(err.Error(), "limit of 65536 bytes") || errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("large manifest: %v", err)
	}
	if list := p.Profiles().List(); len(list) != 0 {
		t.Errorf("profiles %+v", list)
	}
}

// Equal pulls at the same time do not harm one another, and leave one profile with one reference.
func TestPullProfileAtTheSameTime(t *testing.T) {
	const pulls = 4
	reg := registrytest.New(t)
	top := reg.PutArtifact("profile", "v1", profile.MediaType, registrytest.File{Content: []byte(seccompJSON)})
	var all sync.WaitGroup
	all.Add(pulls)
	reg.Wrap(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/manifests/"+top.Digest.String()) {
				all.Done()
				all.Wait()
			}
			next.ServeHTTP(w, r)
		})
	})
	p := openForProfiles(t, t.TempDir())
	var done sync.WaitGroup
	for range pulls {
		done.Go(func() {
			cached, err := p.PullProfile(t.Context(), "", reg.Host()+"/profile@"+top.Digest.String(), nil)
			if err != nil || cached {
				t.Errorf("cached %t, %v", cached, err)
			}
		})
	}
	done.Wait()
	if list := p.Profiles().List(); len(list) != 1 || len(list[0].Refs) != 1 {
		t.Errorf("profiles %+v", list)
	}
}
