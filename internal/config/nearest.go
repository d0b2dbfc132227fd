package config

// nearest returns the option whose key takes the fewest edits to get from key.
func nearest(key string) string {
	best, least := "", -1
	for _, o := range options() {
		if d := distance(key, o.Key); least < 0 || d < least {
			best, least = o.Key, d
		}
	}
	return best
}

// distance is the Levenshtein distance of two strings, in bytes. Only the start
// of a long a counts, so that a file cannot make it expensive.
func distance(a, b string) int {
	a = a[:min(len(a), 64)]
	row := make([]int, len(b)+1) // row[j]: distance of a[:i] and b[:j]
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0] // distance of a[:i] and b[:j]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
