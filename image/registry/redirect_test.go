package registry

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
)

// A registry, here on this machine, must not direct requests to the cloud's metadata service: for
// manifests, blobs or tokens.
func TestMetadataServiceIsNotContacted(t *testing.T) {
	const credentials = "http://169.254.169.254/latest/meta-data/iam/security-credentials/role?secret=hunter2"
	for name, c := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"manifest": func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, credentials, http.StatusTemporaryRedirect)
			return true
		},
		"config": func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/blobs/") {
				return false
			}
			http.Redirect(w, r, credentials, http.StatusFound)
			return true
		},
		"token": func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf("Bearer realm=%q", credentials))
			w.WriteHeader(http.StatusUnauthorized)
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			reg := registrytest.New(t)
			putImage(reg, "app", "v1", []byte("x"))
			reg.Before = c
			_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{Username: "u", Password: "p"})
			wantCode(t, err, codes.FailedPrecondition, "169.254.169.254", "metadata service", "redirect_to")
			if err != nil && (strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "role")) {
				t.Errorf("the error shows the URL: %v", err)
			}
		})
	}
}
