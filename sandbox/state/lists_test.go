package state

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"
)

// published is an object with a fixed snapshot.
type published[T any] struct {
	info  *T
	birth Birth
}

func (p published[T]) Visible() bool { return p.info != nil }
func (p published[T]) Info() *T      { return p.info }
func (p published[T]) Birth() Birth  { return p.birth }

func publishedPod(p *Pod) published[Pod] { return published[Pod]{p, Birth{p.CreatedAt, p.ID}} }

func publishedContainer(c *Container) published[Container] {
	return published[Container]{c, Birth{c.CreatedAt, c.ID}}
}

// Lists are sorted from oldest to newest after each change, and omit unpublished objects.
func TestListsAreSortedByAge(t *testing.T) {
	pods, containers := NewIndex[published[Pod]]("pod"), NewIndex[published[Container]]("container")
	l, _ := NewLists(pods, containers)
	add := func(id string, created int64) {
		pods.Put(id, publishedPod(&Pod{PodSpec: &PodSpec{ID: id, CreatedAt: time.Unix(created, 0)}}))
		containers.Put(id, publishedContainer(&Container{ContainerSpec: &ContainerSpec{ID: id, CreatedAt: time.Unix(created, 0)}}))
	}
	want := func(ids ...string) {
		t.Helper()
		var gotPods, gotContainers []string
		for _, p := range l.Pods() {
			gotPods = append(gotPods, p.ID)
		}
		for _, c := range l.Containers() {
			gotContainers = append(gotContainers, c.ID)
		}
		if !slices.Equal(gotPods, ids) || !slices.Equal(gotContainers, ids) {
			t.Errorf("pods %v, containers %v, want %v", gotPods, gotContainers, ids)
		}
	}
	want()
	add("c", 2)
	add("b", 1)
	add("a", 2)
	pods.Put("unpublished", published[Pod]{})
	containers.Put("unpublished", published[Container]{})
	want("b", "a", "c")
	want("b", "a", "c")
	add("d", 0)
	want("d", "b", "a", "c")
	pods.Remove("b")
	containers.Remove("b")
	want("d", "a", "c")
}

// Events are created under the feed's lock, so the cost of an event must not grow with the number
// of other pods.
func TestContainersOfOnePod(t *testing.T) {
	containers := NewIndex[published[Container]]("container")
	l, _ := NewLists(NewIndex[published[Pod]]("pod"), containers)
	add := func(id, podID string, age int) {
		containers.Put(id, publishedContainer(&Container{ContainerSpec: &ContainerSpec{ID: id, PodID: podID, CreatedAt: time.Unix(int64(-age), 0)}}))
	}
	add("young", "p", 1)
	add("old", "p", 2)
	containers.Put("unpublished", published[Container]{})
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
		t.Errorf("allocated %d bytes: containers of other pods were copied", bytes)
	}
}

func BenchmarkContainers1000(b *testing.B) {
	containers := NewIndex[published[Container]]("container")
	l, _ := NewLists(NewIndex[published[Pod]]("pod"), containers)
	for i := range 1000 {
		containers.Put(fmt.Sprint(i), publishedContainer(&Container{ContainerSpec: &ContainerSpec{ID: fmt.Sprint(i), CreatedAt: time.Unix(int64(i), 0)}}))
	}
	b.ReportAllocs()
	for b.Loop() {
		if all := l.Containers(); len(all) != 1000 {
			b.Fatal(len(all))
		}
	}
}
