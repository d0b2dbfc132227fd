package sandbox

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"berth/internal/index"
	"berth/sandbox/view"
)

// Events are made under the feed's lock: what one costs must not grow with the other pods of the node.
func TestContainerInfosOfOnePod(t *testing.T) {
	m := &Manager{containers: index.New[*container]("container")}
	add := func(id, podID string, age int) {
		c := &container{id: id, podID: podID}
		c.info.Store(&view.Container{ID: id, PodID: podID, CreatedAt: time.Unix(int64(-age), 0)})
		m.containers.Put(id, c)
	}
	add("young", "p", 1)
	add("old", "p", 2)
	m.containers.Put("half made", &container{id: "half made", podID: "p"})
	infos := m.containerInfos("p")
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
		m.containerInfos("p")
	}
	runtime.ReadMemStats(&after)
	if bytes := (after.TotalAlloc - before.TotalAlloc) / runs; bytes >= others*8 {
		t.Errorf("%d bytes: the others' containers are copied too", bytes)
	}
}
