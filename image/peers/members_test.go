package peers

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/internal/testutil"
)

func TestMembersKeepAddressesOfBrokenNames(t *testing.T) {
	t.Parallel()
	m := newMembers("10.0.0.1:1", []string{"nodes:1", "others:2"}, slog.New(slog.DiscardHandler))
	answers := map[string][]string{"nodes": {"10.0.0.1", "10.0.0.2"}, "others": {"10.0.1.1"}}
	m.resolve = func(_ context.Context, host string) ([]string, error) {
		if answers[host] == nil {
			return nil, errBroken
		}
		return answers[host], nil
	}
	m.refresh(t.Context())
	if got := m.all(); !slices.Equal(got, []string{"10.0.0.1:1", "10.0.0.2:1", "10.0.1.1:2"}) {
		t.Errorf("members %v", got)
	}
	answers["nodes"], answers["others"] = nil, []string{"10.0.1.7"}
	m.refresh(t.Context())
	if got := m.all(); !slices.Equal(got, []string{"10.0.0.1:1", "10.0.0.2:1", "10.0.1.1:2", "10.0.1.7:2"}) {
		t.Errorf("members %v while a name cannot be resolved", got)
	}
	answers["nodes"] = []string{"10.0.0.3"}
	m.refresh(t.Context())
	if got := m.all(); !slices.Equal(got, []string{"10.0.0.1:1", "10.0.0.3:1", "10.0.1.7:2"}) {
		t.Errorf("members %v", got)
	}
}

// All nodes must write an address in the same way.
func TestAddressesHaveOneForm(t *testing.T) {
	t.Parallel()
	m := newMembers("10.0.0.1:1", []string{"[2001:DB8::5]:04789", "nodes:1"}, discard)
	m.resolve = func(_ context.Context, host string) ([]string, error) {
		if host == "nodes" {
			return []string{"::ffff:10.0.0.2", "10.0.0.2", "2001:db8:0::7"}, nil
		}
		return []string{host}, nil
	}
	m.refresh(t.Context())
	want := []string{"10.0.0.1:1", "10.0.0.2:1", "[2001:db8::5]:4789", "[2001:db8::7]:1"}
	if got := m.all(); !slices.Equal(got, want) {
		t.Errorf("members %v, want %v", got, want)
	}
	for text, want := range map[string]string{
		"[2001:DB8::5]:4789": "[2001:db8::5]:4789", "10.0.0.5:04789": "10.0.0.5:4789", "[::ffff:10.0.0.5]:1": "10.0.0.5:1", "node:1": "",
	} {
		if got, err := normalAddress(text); got != want || (err != nil) != (want == "") {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
}

// A seed that hangs costs only its own addresses.
func TestHangingSeed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMembers("10.0.0.1:1", []string{"hangs:1", "nodes:1"}, discard)
		m.resolve = func(ctx context.Context, host string) ([]string, error) {
			if host == "hangs" {
				<-ctx.Done()
			}
			return []string{"10.0.0.2"}, ctx.Err()
		}
		m.refresh(t.Context())
		if got := m.all(); !slices.Equal(got, []string{"10.0.0.1:1", "10.0.0.2:1"}) {
			t.Errorf("members %v", got)
		}
	})
}

func TestPanicOfResolverIsAnError(t *testing.T) {
	t.Parallel()
	m := newMembers("10.0.0.1:1", []string{"nodes:1"}, discard)
	m.resolve = func(context.Context, string) ([]string, error) { panic("test") }
	m.refresh(t.Context())
	if got := m.all(); !slices.Equal(got, []string{"10.0.0.1:1"}) {
		t.Errorf("members %v", got)
	}
}

// The log says once that the seeds lack this node, because other nodes would refuse it.
func TestSeedsWithoutThisNode(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		seeds []string
		fails bool
		want  int
	}{
		"missing":       {[]string{"10.0.0.2:1"}, false, 1},
		"another port":  {[]string{"10.0.0.1:2"}, false, 1},
		"there":         {[]string{"10.0.0.1:1"}, false, 0},
		"no seeds":      {nil, false, 0},
		"not yet known": {[]string{"nodes:1"}, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log testutil.Buffer
			m := newMembers("10.0.0.1:1", c.seeds, slog.New(slog.NewTextHandler(&log, nil)))
			m.resolve = func(_ context.Context, host string) ([]string, error) {
				if c.fails {
					return nil, errBroken
				}
				return []string{host}, nil
			}
			m.refresh(t.Context())
			m.refresh(t.Context())
			if n := strings.Count(log.String(), "do not contain peers.advertise"); n != c.want {
				t.Errorf("%d warnings, want %d", n, c.want)
			}
		})
	}
}

// A pause does not shorten a ban.
func TestPauseDoesNotShortenBan(t *testing.T) {
	t.Parallel()
	m := newMembers("192.0.2.1:80", nil, discard)
	m.known = []string{"192.0.2.1:80", "192.0.2.2:80"}
	m.avoid("192.0.2.2:80", time.Hour)
	m.avoid("192.0.2.2:80", -time.Second) // is over
	if m.usable("192.0.2.2:80") {
		t.Error("the banned member is asked")
	}
	m.avoid("192.0.2.1:80", -time.Second)
	if !m.usable("192.0.2.1:80") {
		t.Error("a member whose ban is over is not asked")
	}
}
