package view

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"berth/internal/index"
)

// published is a container, or pod, and what was published of it.
type published[T any] struct{ info *T }

func (p published[T]) Visible() bool { return p.info != nil }
func (p published[T]) Info() *T      { return p.info }

// Events are made under the feed's lock: what one costs must not grow with the other pods of the node.
func TestContainersOfOnePod(t *testing.T) {
	containers := index.New[published[Container]]("container")
	l, _ := NewLists(index.New[published[Pod]]("pod"), containers)
	add := func(id, podID string, age int) {
		containers.Put(id, published[Container]{&Container{ID: id, PodID: podID, CreatedAt: time.Unix(int64(-age), 0)}})
	}
	add("young", "p", 1)
	add("old", "p", 2)
	containers.Put("half made", published[Container]{})
	infos := l.containersOf("p")
	if len(infos) != 2 || infos[0].ID != "old" || infos[1].ID != "young" {
		t.Fatalf("got %v", infos)
	}
	const others, runs = 500, 100
	for i := range others {
		add(fmt.Sprint("other", i), "another", i)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range runs {
		l.containersOf("p")
	}
	runtime.ReadMemStats(&after)
	if bytes := (after.TotalAlloc - before.TotalAlloc) / runs; bytes >= others*8 {
		t.Errorf("%d bytes: the others' containers are copied too", bytes)
	}
}
