package subject

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"path/filepath"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// readWaits is berth's histogram of reads that waited for content of an incomplete image.
const readWaits = "berth_incomplete_layers_read_wait_seconds"

// ReadWaits are the reads that have waited for content of incomplete images since berth's start.
type ReadWaits struct{ histogram *dto.Histogram }

// ReadWaits asks berth for its metric.
func (s *Subject) ReadWaits(ctx context.Context) (w ReadWaits, err error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(s.state, "debug.sock"))
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://berth/metrics", nil)
	if err != nil {
		return w, err
	}
	response, err := client.Do(request)
	if err != nil {
		return w, err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(response.Body)
	if err != nil {
		return w, fmt.Errorf("metrics of berth: %w", err)
	}
	if f := families[readWaits]; f != nil && len(f.GetMetric()) == 1 {
		w.histogram = f.GetMetric()[0].GetHistogram()
	}
	return w, nil
}

// Since returns how many reads have waited since an earlier moment, and a limit that 99 % of these
// waits do not exceed: the bound of a bucket.
func (w ReadWaits) Since(before ReadWaits) (count uint64, p99 time.Duration) {
	count = w.histogram.GetSampleCount() - before.histogram.GetSampleCount()
	earlier := map[float64]uint64{}
	for _, b := range before.histogram.GetBucket() {
		earlier[b.GetUpperBound()] = b.GetCumulativeCount()
	}
	for _, b := range w.histogram.GetBucket() {
		within := b.GetCumulativeCount() - earlier[b.GetUpperBound()]
		if bound := b.GetUpperBound(); count > 0 && float64(within) >= 0.99*float64(count) && !math.IsInf(bound, 1) {
			return count, time.Duration(bound * float64(time.Second))
		}
	}
	return count, 0
}

// Read reads files of the first container in full and returns the duration.
func (p *Pod) Read(ctx context.Context, dir string) (time.Duration, error) {
	begin := time.Now()
	command := []string{"sh", "-c", "find " + dir + " -xdev -type f -exec cat {} + >/dev/null"}
	r, err := p.s.cri.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: p.Containers[0], Cmd: command, Timeout: 300})
	if err != nil {
		return 0, fmt.Errorf("ExecSync: %w", err)
	}
	if r.ExitCode != 0 {
		return 0, fmt.Errorf("ExecSync: read %s: exit code %d: %s", dir, r.ExitCode, r.Stderr)
	}
	return time.Since(begin), nil
}
