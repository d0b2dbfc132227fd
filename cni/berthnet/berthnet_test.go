package berthnet

import (
	"sync"
	"testing"

	"berth/cni/berthnet/addresses"
	"berth/internal/netns"
	"berth/internal/testutil"
)

func (b *bed) store() *addresses.Store { return addresses.Inspect(b.dir + "/test") }

// kept returns the addresses and host ports of attachments.
func (b *bed) kept() (all []string) {
	b.t.Helper()
	found, err := addresses.Inspect(b.dir + "/test").All()
	testutil.Must(b.t, err)
	for _, r := range found {
		all = append(all, "address of "+r.ContainerID)
	}
	ports, err := b.plugin.filter.Ports(b.key())
	testutil.Must(b.t, err)
	for _, p := range ports {
		all = append(all, p.String())
	}
	return all
}

func BenchmarkAddDel(b *testing.B) {
	for _, c := range []struct {
		name string
		with map[string]any
	}{{"plain", nil}, {"hostPort", hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80})}} {
		b.Run(c.name, func(b *testing.B) {
			bed := newBed(b, nil)
			bed.attached(nil)
			var pods []*testPod
			for range b.N {
				pods = append(pods, bed.pod(c.with))
			}
			b.ResetTimer()
			for _, p := range pods {
				testutil.Must(b, p.add())
				b.StopTimer()
				testutil.Must(b, p.del())
				testutil.Must(b, netns.Remove(p.netns))
				b.StartTimer()
			}
		})
		b.Run("DEL-"+c.name, func(b *testing.B) {
			bed := newBed(b, nil)
			bed.attached(nil)
			b.ResetTimer()
			for range b.N {
				b.StopTimer()
				p := bed.pod(c.with)
				testutil.Must(b, p.add())
				b.StartTimer()
				testutil.Must(b, p.del())
				b.StopTimer()
				testutil.Must(b, netns.Remove(p.netns))
				b.StartTimer()
			}
		})
	}
}

// BenchmarkAddParallel attaches eight pods concurrently.
func BenchmarkAddParallel(b *testing.B) {
	bed := newBed(b, nil)
	bed.attached(nil)
	work := make(chan *testPod, b.N)
	var pods []*testPod
	for range b.N {
		p := bed.pod(nil)
		pods = append(pods, p)
		work <- p
	}
	close(work)
	b.ResetTimer()
	var adds sync.WaitGroup
	for range 8 {
		adds.Go(func() {
			for p := range work {
				if err := p.add(); err != nil {
					b.Error(err)
				}
			}
		})
	}
	adds.Wait()
	b.StopTimer()
	for _, p := range pods {
		testutil.Must(b, p.del())
		testutil.Must(b, netns.Remove(p.netns))
	}
}
