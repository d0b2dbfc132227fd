package launcher

func warm() {}
