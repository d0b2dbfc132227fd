package report

import (
	"math"
	"slices"
)

// Series holds the values of one runtime for one row.
type Series struct {
	Values []float64 // in the row's unit
	Failed string    // error that ended the samples; empty: none
}

// Quantile returns the smallest value that at least the share q of all values does not exceed.
func (s Series) Quantile(q float64) float64 {
	sorted := slices.Sorted(slices.Values(s.Values))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// Results holds the series by row and column.
type Results struct {
	series map[[2]string]*Series
	paces  map[string]*Series
}

// Of returns the series of a row and a column. The caller may add to it.
func (r *Results) Of(row, column string) *Series {
	if r.series == nil {
		r.series = map[[2]string]*Series{}
	}
	key := [2]string{row, column}
	if r.series[key] == nil {
		r.series[key] = &Series{}
	}
	return r.series[key]
}

// Pace returns the durations in ms of the fixed piece of work before each sample of a row.
func (r *Results) Pace(row string) *Series {
	if r.paces == nil {
		r.paces = map[string]*Series{}
	}
	if r.paces[row] == nil {
		r.paces[row] = &Series{}
	}
	return r.paces[row]
}

// QuickestPace returns the median pace of the row during which the machine was fastest; 0: nothing
// was measured.
func (r *Results) QuickestPace() (ms float64) {
	for _, s := range r.paces {
		if len(s.Values) > 0 && (ms == 0 || s.Quantile(0.5) < ms) {
			ms = s.Quantile(0.5)
		}
	}
	return ms
}

// slowestPace returns the median pace of the row during which the machine was slowest; 0: nothing
// was measured.
func (r *Results) slowestPace() (ms float64) {
	for _, s := range r.paces {
		if len(s.Values) > 0 {
			ms = max(ms, s.Quantile(0.5))
		}
	}
	return ms
}

// slowness returns a row's pace in units of the quickest one.
func (r *Results) slowness(row string) string {
	s := r.paces[row]
	if s == nil || len(s.Values) == 0 {
		return "–"
	}
	return "×" + number(s.Quantile(0.5)/r.QuickestPace())
}

// Column is a runtime in the table.
type Column struct{ Name, Version string }
