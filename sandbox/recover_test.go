package sandbox

import (
	"context"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/semaphore"
)

// After a reboot all pods are to be taken down: some at a time, and those in line have not got their turns, which clients may take.
func TestTakenDownSomeAtATime(t *testing.T) {
	m, _, _ := aReadyPod(t)
	m.recovering = semaphore.NewWeighted(recoverAtOnce)
	pods := make([]*pod, 4*recoverAtOnce)
	var working, tooMany atomic.Int32
	begun, proceed := make(chan *pod, len(pods)), make(chan struct{})
	for i := range pods {
		p := &pod{id: "q", turn: make(chan struct{}, 1)}
		pods[i] = p
		m.laterWithPod("stop", p, func(context.Context) error {
			if working.Add(1) > recoverAtOnce {
				tooMany.Add(1)
			}
			defer working.Add(-1)
			begun <- p
			<-proceed
			return nil
		})
	}
	for _, start := range m.unfinished {
		start()
	}
	first := map[*pod]bool{}
	for range recoverAtOnce {
		first[<-begun] = true
	}
	for _, p := range pods {
		select {
		case p.turn <- struct{}{}:
			<-p.turn
			if first[p] {
				t.Error("a pod is taken down without its turn")
			}
		default:
			if !first[p] {
				t.Error("a pod in line has its turn")
			}
		}
	}
	close(proceed)
	m.tasks.Background.Close()
	if err := m.tasks.Background.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if tooMany.Load() > 0 || len(begun) != len(pods)-recoverAtOnce {
		t.Errorf("%d times too many at a time, %d in line were worked on", tooMany.Load(), len(begun))
	}
}
