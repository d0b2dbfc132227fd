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

// The daemon takes nothing from a compromised process that profile.Parse would not return.
func TestCheckProfileOfLiar(t *testing.T) {
	for answer, want := range map[string]string{
		`{"profile":{"defaultAction":"SCMP_ACT_ERRNO"}}`:  "",
		`{"profile":{"defaultAction":"SCMP_ACT_NOTIFY"}}`: "SCMP_ACT_NOTIFY",
		`{"profile":{"defaultAction": "SCMP_ACT_ERRNO"}}`: "not canonical",
	} {
		got, err := liar(t).CheckProfile(t.Context(), t.TempDir(), []byte(answer))
		if want == "" && (err != nil || string(got) != `{"defaultAction":"SCMP_ACT_ERRNO"}`) {
			t.Errorf("%s: got %s, %v", answer, got, err)
		}
		if want != "" && (errdefs.Code(err) != codes.Internal || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %s, %v; want %s", answer, got, err, want)
		}
	}
}
