package copying

import (
	"os"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestReserveIsShareOfLimit(t *testing.T) {
	for name, test := range map[string]struct{ limit, first int }{
		"of a test":      {256, 192},
		"of a shell":     {1024, 768},
		"of a container": {20000, 15904},
		"systemd's":      {524288, 520192},
		"tiny":           {32, -32},
	} {
		t.Run(name, func(t *testing.T) {
			q := quotaFor(test.limit)
			if q.Allows(test.first) || !q.Allows(test.first-1) {
				t.Errorf("the reserve of %d does not start at %d: %+v", test.limit, test.first, q)
			}
		})
	}
}

func TestCheckRefusesTheReserve(t *testing.T) {
	q, err := NewFDQuota()
	testutil.Must(t, err)
	if err := q.Check(); err != nil {
		t.Errorf("with %d descriptors: %v", q.Limit(), err)
	}
	f, err := os.Open("/dev/null")
	testutil.Must(t, err)
	defer f.Close()
	if err := quotaFor(minReserve + int(f.Fd())).Check(); errdefs.Code(err) != codes.ResourceExhausted {
		t.Errorf("within the reserve: %v", err)
	}
}
