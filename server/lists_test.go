package server

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestSendBatches(t *testing.T) {
	t.Parallel()
	const most = batchBytes
	for name, sizes := range map[string][]int{
		"nothing":         {},
		"one":             {1},
		"fit in one":      {most / 4, most / 4, most / 4},
		"split":           {most / 2, most / 2, most / 2, most / 2, most / 2},
		"a large one":     {1, most + 1, 1},
		"only large ones": {most + 1, most + 1},
		"many":            slices.Repeat([]int{1000}, 5000),
	} {
		t.Run(name, func(t *testing.T) {
			var items, got []*runtimeapi.Container
			for _, n := range sizes {
				items = append(items, &runtimeapi.Container{Id: strings.Repeat("x", n)})
			}
			var batches [][]*runtimeapi.Container
			err := sendBatches(slices.Values(items), func(b []*runtimeapi.Container) error {
				size := 0
				for _, item := range b {
					size += proto.Size(item)
				}
				if len(b) == 0 || len(b) > 1 && size > batchBytes {
					t.Errorf("a batch of %d items, %d bytes", len(b), size)
				}
				batches = append(batches, b)
				return nil
			})
			for _, b := range batches { // after the last send, because batches must not share memory
				got = append(got, b...)
			}
			if err != nil || !slices.Equal(got, items) {
				t.Errorf("got %d of %d items, or in another order; error %v", len(got), len(items), err)
			}
		})
	}
}

func TestSendBatchesStopsWithItsClient(t *testing.T) {
	t.Parallel()
	gone := errors.New("gone")
	made, sent := 0, 0
	items := func(yield func(*runtimeapi.Container) bool) {
		for made < 100 {
			made++
			if !yield(&runtimeapi.Container{Id: strings.Repeat("x", batchBytes)}) {
				return
			}
		}
	}
	err := sendBatches(items, func([]*runtimeapi.Container) error { sent++; return gone })
	if !errors.Is(err, gone) || sent != 1 || made != 2 {
		t.Errorf("%d items made, %d batches sent, error %v", made, sent, err)
	}
}
