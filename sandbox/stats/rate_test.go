package stats

import (
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/cgstats"
)

// Each step takes a sample and states the expected rate.
func TestRate(t *testing.T) {
	t.Parallel()
	const second = uint64(time.Second)
	const unknown = -1.0 // cores
	type step struct {
		at    time.Duration
		usage float64 // CPU seconds
		cores float64
	}
	for name, steps := range map[string][]step{
		"one client":           {{0, 5, unknown}, {10 * time.Second, 10, 0.5}, {20 * time.Second, 30, 2}, {30 * time.Second, 30, 0}},
		"the second sample":    {{0, 5, unknown}, {500 * time.Millisecond, 5.25, 0.5}},
		"far too early":        {{0, 5, unknown}, {time.Millisecond, 5.01, unknown}, {500 * time.Millisecond, 5.25, 0.5}},
		"after a short window": {{0, 0, unknown}, {time.Second, 1, 1}, {1100 * time.Millisecond, 1, 1 / 1.1}, {1999 * time.Millisecond, 1, 1 / 1.999}, {2 * time.Second, 1, 0}},
		// One client reads every 400 ms and one every 2 s. Both see about the last second.
		"two clients": {{0, 0, unknown}, {400 * time.Millisecond, 0.4, 1}, {800 * time.Millisecond, 0.8, 1}, {1200 * time.Millisecond, 1.2, 1},
			{1600 * time.Millisecond, 1.2, 0.75}, {2 * time.Second, 1.2, 0.6}, {2001 * time.Millisecond, 1.2, 1.2 / 2.001}, {2400 * time.Millisecond, 1.2, 0}},
		"counts anew": {{0, 5, unknown}, {10 * time.Second, 1, unknown}, {11 * time.Second, 2, 1}},
		// A later sample arrives first. The rate since the sample before it stays known.
		"a late one":                 {{0, 0, unknown}, {2 * time.Second, 2, 1}, {1900 * time.Millisecond, 1.9, 1}, {2100 * time.Millisecond, 2, 2 / 2.1}, {4 * time.Second, 2, 0}},
		"a late one after the first": {{time.Second, 5, unknown}, {0, 4, unknown}, {3 * time.Second, 6, 0.5}},
		"no time between":            {{0, 5, unknown}, {0, 5, unknown}, {2 * time.Second, 6, 0.5}, {2 * time.Second, 6, 0.5}},
	} {
		t.Run(name, func(t *testing.T) {
			var r rate
			begin := time.Now()
			for _, s := range steps {
				got, known := r.add(begin.Add(s.at), uint64(s.usage*float64(second)))
				if known != (s.cores != unknown) {
					t.Fatalf("after %v: %d, known %v", s.at, got, known)
				}
				if want := s.cores * float64(second); known && (float64(got) < want-2 || float64(got) > want+2) {
					t.Errorf("after %v: %d, want %.0f", s.at, got, want)
				}
			}
		})
	}
}

func TestDefaultInterfaceIsFirst(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, want []string }{
		{nil, nil},
		{[]string{"net1"}, []string{"net1"}},
		{[]string{"net1", "net2", "eth0"}, []string{"eth0", "net2", "net1"}},
		{[]string{"eth0", "net1"}, []string{"eth0", "net1"}},
	} {
		t.Run(strings.Join(c.in, " "), func(t *testing.T) {
			var in []cgstats.Interface
			for _, name := range c.in {
				in = append(in, cgstats.Interface{Name: name})
			}
			if got := interfaceNames(defaultFirst(in)); !slices.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
	many := make([]cgstats.Interface, 10*maxInterfaces)
	many[len(many)-1].Name = defaultInterface
	if got := interfaceNames(defaultFirst(many)); len(got) != maxInterfaces || got[0] != defaultInterface {
		t.Errorf("%d of many interfaces: %v", len(got), got)
	}
}

func interfaceNames(interfaces []cgstats.Interface) (names []string) {
	for _, i := range interfaces {
		names = append(names, i.Name)
	}
	return names
}
