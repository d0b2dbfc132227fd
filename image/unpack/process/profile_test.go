package process

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/image/profile"
	"berth/internal/errdefs"
)

// The confined process accepts what profile.Parse accepts, and refuses the rest for good.
func TestCheckProfile(t *testing.T) {
	eachBuild(t, time.Minute, func(t *testing.T, p *Program) {
		good := `{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}`
		want, err := profile.Parse([]byte(good))
		if err != nil {
			t.Fatal(err)
		}
		got, err := p.CheckProfile(t.Context(), t.TempDir(), []byte(good))
		if err != nil || string(got) != string(want) {
			t.Errorf("got %s, %v", got, err)
		}
		for _, bad := range []string{"", "[", `{"defaultAction":"SCMP_ACT_NOTIFY"}`, strings.Repeat(" ", profile.MaxSize+1)} {
			_, err := p.CheckProfile(t.Context(), t.TempDir(), []byte(bad))
			if errdefs.Code(err) != codes.InvalidArgument || !strings.HasPrefix(err.Error(), "SecurityProfileInvalid: ") ||
				strings.Count(err.Error(), "SecurityProfileInvalid") != 1 {
				t.Errorf("%.20q: %v", bad, err)
			}
		}
	})
}
